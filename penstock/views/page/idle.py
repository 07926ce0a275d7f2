"""Idle: where the time of every rank goes: compute, and the four causes of its bubble."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.ir import Trace, percent_text, seconds_text

CAUSES = (
    ("compute", "passes of its stages"),
    ("warm-up", "before the first values arrive"),
    ("wait", "between passes, for data of other ranks"),
    ("imbalance", "less work than the busiest rank has"),
    ("drain", "after its last pass"),
)
MAX_ROWS = 64


class Slice(NamedTuple):
    """One cause and its share of the step in per cent."""

    cause: int
    share: float
    tip: str


class Row(NamedTuple):
    """One rank of one trace."""

    name: str
    slices: tuple[Slice, ...]
    bubble: str


def idle_rows(trace: Trace) -> list[Row]:
    """A row per rank and one for all, as far as there is room."""
    if not trace.makespan:
        return []
    seconds = [(work, *idle) for work, idle in zip(trace.work, trace.idle, strict=True)]
    together = tuple(sum(column) / len(seconds) for column in zip(*seconds, strict=True))
    rows = [_row(f"rank {rank}", own, trace.makespan) for rank, own in enumerate(seconds[:MAX_ROWS])]
    return [*rows, _row("all ranks", together, trace.makespan)]


def sentence(trace: Trace) -> str:
    """The largest cause, in words."""
    if not trace.makespan:
        return ""
    totals = [sum(column) / len(trace.idle) / trace.makespan for column in zip(*trace.idle, strict=True)]
    if max(totals) < 5e-4:
        return "No rank is ever idle."
    place = totals.index(max(totals))
    name, words = CAUSES[place + 1]
    share = percent_text(totals[place])
    return f"Most of the bubble of {percent_text(trace.bubble)} is {name}, {words}: {share} of all ranks' time."


def _row(name: str, seconds: tuple[float, ...], makespan: float) -> Row:
    return Row(name, tuple(_slices(seconds, makespan)), percent_text(sum(seconds[1:]) / makespan))


def _slices(seconds: tuple[float, ...], makespan: float) -> Iterator[Slice]:
    for cause, own in enumerate(seconds):
        if own > 0:
            tip = f"{CAUSES[cause][0]}: {seconds_text(own, 3)}, {percent_text(own / makespan)}"
            yield Slice(cause, round(100 * own / makespan, 2), tip)
