"""The contract of a view: a frozen record of its options that turns what it draws into a document."""

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, Literal, TypeAlias, TypeVar

from rich.console import Console, RenderableType

from penstock.errors import ViewError
from penstock.ir import Graph, Partition, Trace
from penstock.views.drawing import Drawing

Document = TypeVar("Document", str, bytes)
Subject = TypeVar("Subject")
Traces: TypeAlias = "Trace | Mapping[str, Trace]"
Staged: TypeAlias = "Graph | tuple[Graph, Partition]"
MAX_NAME = 80


class View(ABC, Generic[Subject, Document]):
    """Something to look at: called with its subject, it gives the document.

    Views of traces take one or several by name, `Svg(width=900)(trace)` or `Svg()({"gpipe": one, "1f1b": other})`.
    Views of graphs take a graph, or one with its cut, `Model()(graph)` or `Model()((graph, partition))`. That of
    profiles takes one, and the report takes the contents that `penstock.report` gathers.
    """

    name: ClassVar[str]
    noun: ClassVar[type]
    """what it draws: Trace, Graph, Profile or Plan"""
    suffix: ClassVar[str]
    """how the name of a file with the document ends"""

    @abstractmethod
    def __call__(self, subject: Subject, /) -> Document: ...


class Drawn(View[Traces, Document]):
    """A view of traces that is a drawing, whatever the format of its file."""

    noun = Trace

    @abstractmethod
    def drawing(self, traces: Traces) -> Drawing:
        """The picture, in pixels."""


class RichView(View[Subject, str]):
    """A view that also prints itself on a rich console, in colour and as wide as the console is."""

    @abstractmethod
    def renderable(self, subject: Subject, /) -> RenderableType:
        """What `rich.print` or `Console.print` shows."""


def named(traces: Traces) -> dict[str, Trace]:
    """The traces by printable names; a single trace has the empty name."""
    if isinstance(traces, Trace):
        _check(traces)
        return {"": traces}
    entries: object = traces
    if not isinstance(entries, Mapping) or not entries or not all(isinstance(t, Trace) for t in entries.values()):
        raise ViewError("a view needs a trace, or several by name", got=type(traces).__name__, hint="simulate first")
    shown = {_shortened(printable(str(name))): trace for name, trace in traces.items()}
    if len(shown) < len(traces):
        raise ViewError("two traces have the same name once it is printed", names=sorted(shown))
    for trace in shown.values():
        _check(trace)
    return shown


def _check(trace: Trace) -> None:
    if not len(trace.starts):
        raise ViewError("a trace without actions", ranks=trace.num_ranks)


def staged(subject: Staged) -> tuple[Graph, Partition]:
    """The graph and its cut; a graph that is not cut is one stage."""
    if isinstance(subject, Graph):
        return subject, Partition((tuple(node.name for node in subject.nodes),))
    pair: object = subject
    if isinstance(pair, tuple) and [type(item) for item in pair] == [Graph, Partition]:
        subject[1].check(subject[0])
        return subject
    hint = "capture first, then (graph, partition)"
    raise ViewError("a view needs a graph, or a graph and its partition", got=type(pair).__name__, hint=hint)


def printable(name: str) -> str:
    """The name without control characters, which would change a terminal or break a document."""
    return "".join(char if char.isprintable() else "?" for char in name)


def _shortened(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 3] + "..."


def printed(renderable: RenderableType, width: int, color: bool = False) -> str:
    """What a console of that width shows, without trailing blanks unless they are coloured."""
    system: Literal["truecolor"] | None = "truecolor" if color else None
    console = Console(file=io.StringIO(), width=width, color_system=system, force_terminal=color, highlight=False)
    with console.capture() as capture:
        console.print(renderable, soft_wrap=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def check_positive(**values: float) -> None:
    """Refuse options that are not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ViewError(f"{name} must be above 0", value=value)
