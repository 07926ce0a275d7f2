"""Trace: what happened when, predicted by the simulator or recorded by the runtime."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.ir.action import COMPUTE_KINDS, Action, Kind
from penstock.ir.code import stage_of
from penstock.ir.program import Program
from penstock.ir.series import Series

_TOLERANCE = 1e-9


class Span(NamedTuple):
    """One action of one rank and when it ran."""

    rank: int
    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """One message from one rank to another: its Send, when it went on the link and when it had arrived."""

    source: int
    target: int
    action: Action
    start: float
    end: float


class Idle(NamedTuple):
    """Where the idle seconds of one rank come from; together with its work they make the makespan.

    `warm_up` is before its first pass and `drain` after its last. Of the rest, `imbalance` is what it lacks in work
    compared with the busiest rank, and `wait` is waiting for data.
    """

    warm_up: float
    wait: float
    imbalance: float
    drain: float


@dataclass(frozen=True)
class Curve:
    """Bytes held by one rank over time: `held[k]` from `seconds[k]` until `seconds[k + 1]`."""

    seconds: Series
    held: Series

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.held):
            raise ScheduleError("a curve needs a time per figure", times=len(self.seconds), figures=len(self.held))
        seconds, held = self.seconds.values, self.held.values
        _refuse("the times of a curve must be finite and never fall", ~np.isfinite(seconds), seconds=seconds)
        _refuse("the times of a curve must be finite and never fall", seconds[1:] < seconds[:-1], seconds=seconds[1:])
        # Sums of fractions of a byte may end a little below 0.
        lowest = -_TOLERANCE * held.max(initial=1.0)
        _refuse("a curve holds finite bytes, 0 or more", ~(np.isfinite(held) & (held >= lowest)), bytes=held)

    @cached_property
    def peak(self) -> int:
        """The most bytes held at any time."""
        return int(self.held.values.max()) if len(self.held) else 0


@dataclass(frozen=True)
class Trace:
    """A run of a Program: when each action started and ended, when each message travelled, what each rank held.

    `starts` and `ends` go by the index of an action in `program.table`; `sent` and `arrived` by the Sends in that
    order. Seconds count from the start of the step.
    """

    program: Program
    starts: Series
    ends: Series
    sent: Series
    arrived: Series
    memory: tuple[Curve, ...]

    def __post_init__(self) -> None:
        table = self.program.table
        num_sends = int((table.kinds == Kind.SEND).sum())
        expected = {"starts": len(table.codes), "ends": len(table.codes), "sent": num_sends, "arrived": num_sends}
        for name, length in expected.items():
            if (figures := len(getattr(self, name))) != length:
                raise ScheduleError(f"{name} does not fit the program", figures=figures, expected=length)
        if len(self.memory) != self.program.num_ranks:
            raise ScheduleError("one memory curve per rank is needed", curves=len(self.memory), ranks=len(table))
        self._check_times()

    def _check_times(self) -> None:
        starts, ends, sent, arrived = (each.values for each in (self.starts, self.ends, self.sent, self.arrived))
        _refuse("an action starts at finite seconds, 0 or more", ~(np.isfinite(starts) & (starts >= 0)), start=starts)
        _refuse("an action ends at finite seconds, not before it starts", ~_spans(starts, ends), start=starts, end=ends)
        _refuse("a message arrives not before it is sent", ~_spans(sent, arrived), sent=sent, arrived=arrived)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action of every rank with its times, rank by rank in order."""
        ranks, actions = self.program.table.rank_of.tolist(), (a for order in self.program.orders for a in order)
        return tuple(map(Span, ranks, actions, self.starts, self.ends))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every message with its times."""
        sends = ((span.rank, span.action) for span in self.spans if span.action.kind is Kind.SEND)
        return tuple(
            Transfer(rank, self.program.placement[getattr(action, "peer")], action, start, end)  # noqa: B009
            for (rank, action), start, end in zip(sends, self.sent, self.arrived, strict=True)
        )

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.program.num_ranks

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last action: the length of a synchronous step."""
        return float(self.ends.values.max(initial=0.0))

    @cached_property
    def _compute(self) -> NDArray[np.bool_]:
        return np.isin(self.program.table.kinds, COMPUTE_KINDS)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds of compute of every rank."""
        busy = np.where(self._compute, self.ends.values - self.starts.values, 0.0)
        return tuple(np.bincount(self.program.table.rank_of, busy, self.num_ranks).tolist())

    @cached_property
    def stage_seconds(self) -> tuple[float, ...]:
        """Seconds of compute of every stage; two passes that overlap count for the stage of the forward."""
        table, busy = self.program.table, np.where(self._compute, self.ends.values - self.starts.values, 0.0)
        stages = np.where(self._compute, stage_of(table.codes), 0)
        return tuple(np.bincount(stages, busy, self.program.num_stages).tolist())

    @cached_property
    def windows(self) -> tuple[tuple[float, float], ...]:
        """Per rank the start of its first pass and the end of its last."""
        ranks = self.program.table.rank_of[self._compute]
        first, last = np.full(self.num_ranks, np.inf), np.zeros(self.num_ranks)
        np.minimum.at(first, ranks, self.starts.values[self._compute])
        np.maximum.at(last, ranks, self.ends.values[self._compute])
        first[np.isinf(first)] = 0.0  # a rank without passes
        return tuple(zip(first.tolist(), last.tolist(), strict=True))

    @cached_property
    def span(self) -> float:
        """The largest time from first start to last end on one rank: the length in the zero-bubble papers' measure."""
        return max(last - first for first, last in self.windows)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in the step that is not compute."""
        return _idle_share(sum(self.work), self.num_ranks * self.makespan)

    @property
    def span_bubble(self) -> float:
        """The share of the span that is not compute."""
        return _idle_share(sum(self.work), self.num_ranks * self.span)

    @cached_property
    def idle(self) -> tuple[Idle, ...]:
        """Per rank where its idle time comes from."""
        busiest = max(self.work)
        parts = []
        for work, (first, last) in zip(self.work, self.windows, strict=True):
            inside = max(0.0, last - first - work)
            imbalance = min(inside, busiest - work)
            parts.append(Idle(first, inside - imbalance, imbalance, self.makespan - last))
        return tuple(parts)

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that the rank holds at any time."""
        if not 0 <= rank < self.num_ranks:
            raise ScheduleError("no such rank", rank=rank, ranks=self.num_ranks)
        return self.memory[rank].peak


def _spans(starts: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(starts) & np.isfinite(ends) & (ends >= starts))


def _refuse(problem: str, wrong: NDArray[np.bool_], **figures: NDArray[np.float64]) -> None:
    """Raise if anything is wrong, with the place and the figures of the first."""
    if wrong.any():
        place = int(np.argmax(wrong))
        raise ScheduleError(problem, place=place, hint="", **{name: float(row[place]) for name, row in figures.items()})


def _idle_share(work: float, capacity: float) -> float:
    return 1.0 - work / capacity if capacity else 0.0
