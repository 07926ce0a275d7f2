"""table: the figures of one trace, or of many side by side, a line each.

Choose it to compare schedules or plans at a glance. The plain text is a Markdown table; on a terminal rich draws it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table as RichTable

from penstock.ir import Trace, bytes_text, number_text, percent_text, seconds_text
from penstock.views.base import RichView, Traces, named
from penstock.views.sheet import Sheet
from penstock.views.summary import Summary, summary


@dataclass(frozen=True)
class Table(RichView[Traces]):
    """A line per trace: how long, how idle and why, and how much each holds and says.

    `in flight` is the most microbatches held by a rank, `peak` the most bytes. The four causes share out the bubble:
    `warm-up` before a rank's first pass, `wait` for data, `imbalance` of work, `drain` after its last pass.
    """

    name = "table"
    noun = Trace
    suffix = ".txt"

    def __call__(self, traces: Traces) -> str:
        return self._sheet(traces).markdown()

    def renderable(self, traces: Traces) -> RichTable:
        return self._sheet(traces).rich()

    def _sheet(self, traces: Traces) -> Sheet:
        figures = {name: summary(trace) for name, trace in named(traces).items()}
        columns = {**_ALWAYS, **(_BYTES if any(each.peak_bytes for each in figures.values()) else {}), **_IDLE}
        rows = tuple((name, *(text(each) for text in columns.values())) for name, each in figures.items())
        return Sheet(("trace", *columns), rows)


_ALWAYS: dict[str, Callable[[Summary], str]] = {
    "makespan": lambda each: seconds_text(each.makespan),
    "bubble": lambda each: percent_text(each.bubble),
    "span bubble": lambda each: percent_text(each.span_bubble),
    "in flight": lambda each: number_text(each.in_flight, 3),
    "messages": lambda each: str(each.num_messages),
}
_BYTES: dict[str, Callable[[Summary], str]] = {"peak": lambda each: bytes_text(each.peak_bytes)}
_IDLE: dict[str, Callable[[Summary], str]] = {
    "warm-up": lambda each: percent_text(each.idle.warm_up),
    "wait": lambda each: percent_text(each.idle.wait),
    "imbalance": lambda each: percent_text(each.idle.imbalance),
    "drain": lambda each: percent_text(each.idle.drain),
}
