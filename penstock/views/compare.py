"""compare: two traces and the difference between them, figure by figure, rank by rank, action by action.

Choose it for "how good was the prediction" (predicted against recorded) and "what would the other schedule cost". Where
both traces run the same program, the passes whose starts differ most are listed. `Compare().svg(traces)` draws both,
one above the other on one scale of time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.console import Group

from penstock.errors import ViewError
from penstock.ir import COMPUTE_KINDS, Idle, Trace, bytes_text, decode, number_text, percent_text, seconds_text
from penstock.views.base import RichView, Traces, check_positive, named
from penstock.views.sheet import Sheet
from penstock.views.summary import summary
from penstock.views.svg import Svg

Names = tuple[str, str]
Row = tuple[str, ...]
Text = Callable[[float], str]
MAX_RANKS = 16
ROUNDING = 1e-9


@dataclass(frozen=True)
class Compare(RichView[Traces]):
    """Tables of the second trace against the first; a percent is of the first."""

    actions: int = 8
    """how many of the actions whose starts differ most are listed"""
    name = "compare"
    noun = Trace
    suffix = ".txt"

    def __post_init__(self) -> None:
        check_positive(actions=self.actions)

    def __call__(self, traces: Traces) -> str:
        return "\n\n".join(sheet.markdown() for sheet in self._sheets(traces))

    def renderable(self, traces: Traces) -> Group:
        return Group(*(sheet.rich() for sheet in self._sheets(traces)))

    def svg(self, traces: Traces) -> str:
        """Both timelines as an SVG document, one above the other."""
        _pair(traces)
        return Svg(critical=True)(traces)

    def _sheets(self, traces: Traces) -> list[Sheet]:
        names, first, second = _pair(traces)
        sheets = [_whole(names, first, second)]
        if first.num_ranks == second.num_ranks:
            sheets.append(_by_rank(names, first, second))
        if first.program == second.program:
            sheets.append(_by_action(names, first, second, self.actions))
        return sheets


def _pair(traces: Traces) -> tuple[Names, Trace, Trace]:
    shown = named(traces)
    if len(shown) != 2:
        hint = '{"predicted": one, "recorded": other}'
        raise ViewError("a comparison needs two traces", traces=len(shown), hint=hint)
    (one, first), (other, second) = shown.items()
    return (one, other), first, second


def _whole(names: Names, first: Trace, second: Trace) -> Sheet:
    old, new = summary(first), summary(second)
    rows = [
        _row("makespan", (old.makespan, new.makespan), seconds_text),
        _row("span", (old.span, new.span), seconds_text),
        _row("bubble", (old.bubble, new.bubble), percent_text),
        _row("span bubble", (old.span_bubble, new.span_bubble), percent_text),
        *_idle_rows("bubble: ", zip(old.idle, new.idle, strict=True), percent_text),
        _row("in flight", (old.in_flight, new.in_flight), partial(number_text, digits=3)),
        _row("messages", (old.num_messages, new.num_messages), partial(number_text, digits=9)),
        _row("peak", (old.peak_bytes, new.peak_bytes), bytes_text),
    ]
    return Sheet(("whole step", *names, "difference", "percent"), tuple(rows))


def _by_rank(names: Names, first: Trace, second: Trace) -> Sheet:
    """Work, idle seconds and peak of every rank, or of the MAX_RANKS whose work and idle time differ most."""
    change = np.abs(np.subtract(first.work, second.work)) + np.abs(np.subtract(first.idle, second.idle)).sum(axis=1)
    rows: list[Row] = []
    for rank in np.sort(np.argsort(-change, kind="stable")[:MAX_RANKS]).tolist():
        rows.append(_row(f"rank {rank}: work", (first.work[rank], second.work[rank]), seconds_text))
        rows += _idle_rows(f"rank {rank}: ", zip(first.idle[rank], second.idle[rank], strict=True), seconds_text)
        rows.append(_row(f"rank {rank}: peak", (first.peak_bytes(rank), second.peak_bytes(rank)), bytes_text))
    left_out = first.num_ranks - MAX_RANKS
    title = f"ranks ({left_out} that differ less left out)" if left_out > 0 else "ranks"
    return Sheet((title, *names, "difference", "percent"), tuple(rows))


def _by_action(names: Names, first: Trace, second: Trace, count: int) -> Sheet:
    table = first.program.table
    passes = np.flatnonzero(np.isin(table.kinds, COMPUTE_KINDS))
    change = np.abs(second.starts.values - first.starts.values)[passes]
    chosen = passes[np.argsort(-change, kind="stable")[:count]].tolist()
    rows = [
        _row(f"rank {table.rank_of[place]}: {action}", (first.starts[place], second.starts[place]), seconds_text)
        for place, action in zip(chosen, decode(table.codes[chosen]), strict=True)
    ]
    return Sheet(("starts that differ most", *names, "difference", "percent"), tuple(rows))


def _idle_rows(prefix: str, pairs: Iterable[tuple[float, float]], text: Text) -> list[Row]:
    words = (field.replace("_", "-") for field in Idle._fields)
    return [_row(prefix + word, pair, text) for word, pair in zip(words, pairs, strict=True) if any(pair)]


def _row(word: str, pair: tuple[float, float], text: Text) -> Row:
    old, new = pair
    shown = text(abs(new - old))
    if shown == text(0.0) or abs(new - old) <= ROUNDING * max(old, new):
        return (word, text(old), text(new), "0", "")
    sign = "+" if new > old else "-"
    # A difference of shares is in points already.
    if text is percent_text:
        return (word, text(old), text(new), f"{sign}{shown.removesuffix('%')}points", "")
    return (word, text(old), text(new), f"{sign}{shown}", f"{100 * (new - old) / old:+.1f} %" if old else "")
