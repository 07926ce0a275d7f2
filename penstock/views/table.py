"""The metrics of one trace, or of several side by side, a line each; and the text tables that all views use.

Choose it to compare schedules or plans at a glance. The plain text is a Markdown table; on a terminal rich draws it.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from penstock.ir import Idle, Kind, Trace, bytes_text, number_text, percent_text, seconds_text
from penstock.views.base import RichView, Subject, Traces, traces_by_name


@dataclass(frozen=True)
class TextTable:
    """Rows of text under a header, names in the first columns and values in the others."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    """number of columns that hold names"""

    def markdown(self) -> str:
        """The lines of a Markdown table, aligned so that the text is readable as it is."""
        cells = [[text.replace("|", "\\|") for text in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        dashes = ["-" * (width - 1) for width in widths]
        rule = [f":{line}" if place < self.names else f"{line}:" for place, line in enumerate(dashes)]
        lines = []
        for row in (cells[0], rule, *cells[1:]):
            pairs = enumerate(zip(row, widths, strict=True))
            texts = [text.ljust(width) if place < self.names else text.rjust(width) for place, (text, width) in pairs]
            lines.append(f"| {' | '.join(texts)} |")
        return "\n".join(lines)

    def rich(self) -> RichTable:
        """The same table for a console, where a long header may take two lines."""
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for place, text in enumerate(self.header):
            if place >= self.names:
                table.add_column(Text(text), justify="right", min_width=max(map(len, text.split()), default=1))
            elif self.names > 1:
                table.add_column(Text(text), overflow="fold", style="" if place else "bold")
            else:
                table.add_column(Text(text), no_wrap=True, style="bold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


class TableView(RichView[Subject]):
    """A view that is lines of text above tables: as plain text in Markdown, on a console drawn by rich."""

    @abstractmethod
    def content(self, subject: Subject, /) -> tuple[Sequence[str], Iterable[TextTable]]:
        """The lines, and the tables below them."""

    def __call__(self, subject: Subject) -> str:
        lines, tables = self.content(subject)
        return "\n\n".join([*(["\n".join(lines)] if lines else []), *(table.markdown() for table in tables)])

    def renderable(self, subject: Subject) -> Group:
        lines, tables = self.content(subject)
        return Group(*map(Text, lines), *(table.rich() for table in tables))


class Summary(NamedTuple):
    """Seconds, shares and bytes of a whole trace; `idle` is each cause's share of all ranks' time."""

    makespan: float
    span: float
    bubble: float
    span_bubble: float
    idle: Idle
    in_flight: float
    """the most microbatches whose activations one rank holds at once; one of v stages of a rank counts 1/v"""
    peak_bytes: int
    """the most that any rank holds"""
    num_messages: int


def summary(trace: Trace) -> Summary:
    """The metrics of a trace."""
    return Summary(
        makespan=trace.makespan,
        span=trace.span,
        bubble=trace.bubble,
        span_bubble=trace.span_bubble,
        idle=trace.idle_shares,
        in_flight=max(in_flight(trace)),
        peak_bytes=max(trace.peak_bytes(rank) for rank in range(trace.num_ranks)),
        num_messages=len(trace.sent),
    )


def in_flight(trace: Trace) -> tuple[float, ...]:
    """Per rank the most microbatches between their forward and the end of their backward, in units of a whole rank."""
    table, stages = trace.program.table, trace.program.placement.stages
    passes = table.passes
    is_last = np.isin(passes.kind, (Kind.BACKWARD, Kind.WEIGHT_GRAD))
    begun = np.bincount(passes.index[passes.kind == Kind.FORWARD], minlength=len(table.codes))
    ended = np.bincount(passes.index[is_last], minlength=len(table.codes))
    # While an action runs. Every rank ends with nothing in flight, so one cumulative sum serves all ranks.
    held = np.cumsum(begun - ended) + ended
    ranges = zip(table.starts[:-1].tolist(), table.starts[1:].tolist(), stages, strict=True)
    return tuple(float(held[low:high].max(initial=0)) / len(chunks) for low, high, chunks in ranges)


@dataclass(frozen=True)
class Table(TableView[Traces]):
    """A line per trace: makespan, idle time and its causes, memory and messages.

    `in flight` is the most microbatches held by a rank, `peak` the most bytes. The four causes add up to the bubble:
    `warm-up` before a rank's first pass, `wait` for data, `imbalance` of work, `drain` after its last pass.
    """

    name = "table"
    record = Trace

    def content(self, traces: Traces) -> tuple[Sequence[str], Iterable[TextTable]]:
        metrics = {name: summary(trace) for name, trace in traces_by_name(traces).items()}
        has_bytes = any(each.peak_bytes for each in metrics.values())
        columns = {name: text for name, text in _COLUMNS.items() if has_bytes or name != "peak"}
        rows = tuple((name, *(text(each) for text in columns.values())) for name, each in metrics.items())
        return (), [TextTable(("trace", *columns), rows)]


_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "makespan": lambda each: seconds_text(each.makespan),
    "bubble": lambda each: percent_text(each.bubble),
    "span bubble": lambda each: percent_text(each.span_bubble),
    "in flight": lambda each: number_text(each.in_flight, 3),
    "messages": lambda each: str(each.num_messages),
    "peak": lambda each: bytes_text(each.peak_bytes),
    "warm-up": lambda each: percent_text(each.idle.warm_up),
    "wait": lambda each: percent_text(each.idle.wait),
    "imbalance": lambda each: percent_text(each.idle.imbalance),
    "drain": lambda each: percent_text(each.idle.drain),
}
