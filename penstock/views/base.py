"""The contract of a view: a frozen record of options that turns its subject into a document."""

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, Literal, TypeAlias, TypeVar

from rich.console import Console, RenderableType

from penstock.errors import ViewError
from penstock.ir import Graph, Partition, Trace, printable

Document = TypeVar("Document", str, bytes, str | bytes)
Subject = TypeVar("Subject")
Traces: TypeAlias = "Trace | Mapping[str, Trace]"
"""the subject of views of traces: one trace, or several by name"""
Staged: TypeAlias = "Graph | tuple[Graph, Partition]"
"""the subject of views of graphs: a graph, which is then one stage, or a graph and its stages"""
MAX_NAME = 80
"""characters of a name that is shown"""


class View(ABC, Generic[Subject, Document]):
    """Called with its subject, a view returns the document.

    Views of traces take one trace or several by name: `Timeline(width=900)(trace)`,
    `Timeline()({"gpipe": one, "1f1b": other})`. Views of graphs take a graph, or a graph and its partition:
    `Model()((graph, partition))`. The report takes the `Contents` that `penstock.report` gathers.
    """

    name: ClassVar[str]
    record: ClassVar[type]
    """the record it shows: Trace, Graph, Profile or Plan"""

    @property
    @abstractmethod
    def suffix(self) -> str:
        """The file name extension of the document, such as `.svg`."""

    @abstractmethod
    def __call__(self, subject: Subject, /) -> Document: ...


class RichView(View[Subject, str]):
    """A view that can also be printed on a rich console, in colour and at the width of the console."""

    suffix = ".txt"

    @abstractmethod
    def renderable(self, subject: Subject, /) -> RenderableType:
        """The object for `rich.print` or `Console.print`."""


def traces_by_name(traces: Traces) -> dict[str, Trace]:
    """The traces under printable names; a single trace gets the empty name.

    Raises:
        ViewError: there is no trace, a trace has no actions, or two names become equal once they are printable.
    """
    if isinstance(traces, Trace):
        found = {"": traces}
    else:
        entries: object = traces
        if not isinstance(entries, Mapping) or not entries or not all(isinstance(t, Trace) for t in entries.values()):
            got = type(traces).__name__
            raise ViewError("a view must be given a trace, or several by name", got=got, hint="simulate first")
        found = {}
        for name, trace in traces.items():
            shown = printable(str(name), one_line=True)
            found[shown if len(shown) <= MAX_NAME else f"{shown[: MAX_NAME - 3]}..."] = trace
        if len(found) < len(traces):
            raise ViewError("two traces must not have the same printable name", names=sorted(found))
    for trace in found.values():
        if not len(trace.starts):
            raise ViewError("the trace has no actions", ranks=trace.num_ranks)
    return found


def graph_and_partition(subject: Staged) -> tuple[Graph, Partition]:
    """The graph and its partition; a graph without a partition is one stage."""
    if isinstance(subject, Graph):
        return subject, Partition((tuple(node.name for node in subject.nodes),))
    pair: object = subject
    if isinstance(pair, tuple) and [type(item) for item in pair] == [Graph, Partition]:
        subject[1].check(subject[0])
        return subject
    hint = "capture first, then (graph, partition)"
    raise ViewError("a view must be given a graph, or a graph and its partition", got=type(pair).__name__, hint=hint)


def short_name(name: str) -> str:
    """A printable name of at most MAX_NAME characters; a long one loses its beginning, as its end is more specific."""
    clean = printable(name, one_line=True)
    return clean if len(clean) <= MAX_NAME else f"...{clean[3 - MAX_NAME :]}"


def printed(renderable: RenderableType, width: int, color: bool = False) -> str:
    """The text that a console of that width shows, without trailing blanks unless they are coloured."""
    system: Literal["truecolor"] | None = "truecolor" if color else None
    console = Console(file=io.StringIO(), width=width, color_system=system, force_terminal=color, highlight=False)
    with console.capture() as capture:
        console.print(renderable, soft_wrap=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def check_positive(**values: float) -> None:
    """Raise ViewError for an option that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ViewError(f"{name} must be above 0", value=value)
