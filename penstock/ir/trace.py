"""When every action and message of one step happened, predicted by the simulator or recorded by the runtime."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.action import COMPUTE_KINDS, Action, ComputeAction, Kind, Overlap, Send, needs
from penstock.ir.notebook import timeline
from penstock.ir.orders import Bools, Floats, pack, peer_of, stage_of
from penstock.ir.schedule import Program
from penstock.ir.units import percent_text, seconds_text

_TOLERANCE = 1e-9
_MAX_SECONDS = 1e100  # so that sums and products of times stay finite


class Series:
    """An immutable sequence of floats that compares and hashes like a tuple; `values` is a read-only array."""

    def __init__(self, values: Iterable[float] | Floats) -> None:
        array = values if isinstance(values, np.ndarray) else np.asarray(tuple(values), dtype=np.float64)
        self.values: Floats = np.array(array, dtype=np.float64)
        self.values.flags.writeable = False

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[float]:
        return iter(self.values.tolist())

    def __getitem__(self, index: int) -> float:
        return float(self.values[index])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Series):
            return NotImplemented
        return np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        # Adding 0 turns -0 into 0: equal series must have equal hashes.
        return hash((self.values + 0.0).tobytes())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """JSON form of a series: a list of numbers."""
        from pydantic_core import core_schema

        numbers = core_schema.list_schema(core_schema.float_schema(strict=True, allow_inf_nan=False), strict=True)
        return core_schema.no_info_after_validator_function(cls, numbers)

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:g}" for value in self.values[:6])
        return f"Series({len(self)}: {shown}{', ...' if len(self) > 6 else ''})"


class Span(NamedTuple):
    """One action of one rank and when it ran."""

    rank: int
    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """One message from one rank to another: its Send, when it entered the link and when it had arrived."""

    source: int
    target: int
    action: Action
    start: float
    end: float


class Idle(NamedTuple):
    """Idle time by cause: in seconds of one rank, which add up to the makespan with its work, or as shares of a step.

    `warm_up` is before its first pass and `drain` after its last. Of the rest, `imbalance` is the difference from the
    work of the busiest rank, and `wait` is time spent waiting for data.
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
            raise ScheduleError(
                "seconds and held must have the same length", seconds=len(self.seconds), held=len(self.held)
            )
        seconds, held = self.seconds.values, self.held.values
        _refuse("seconds must be finite and ascending", ~np.isfinite(seconds), seconds=seconds)
        _refuse("seconds must be finite and ascending", seconds[1:] < seconds[:-1], seconds=seconds[1:])
        # Sums of fractions of a byte may end slightly below 0 by rounding.
        lowest = -_TOLERANCE * held.max(initial=1.0)
        _refuse("bytes must be finite, 0 or more", ~(np.isfinite(held) & (held >= lowest)), bytes=held)

    @cached_property
    def peak(self) -> int:
        """The most bytes held at any time."""
        return int(self.held.values.max()) if len(self.held) else 0


@dataclass(frozen=True)
class Trace:
    """One step of a Program: when each action and message started and ended, and the memory of each rank.

    `starts` and `ends` are indexed like the actions in `program.table`; `sent` and `arrived` like its Sends. Seconds
    count from the start of the step.
    """

    program: Program
    """the actions of every rank"""
    starts: Series
    """when each action started"""
    ends: Series
    """when each action ended"""
    sent: Series
    """when each message left"""
    arrived: Series
    """when each message arrived"""
    memory: tuple[Curve, ...]
    """the bytes held by each rank over time"""

    def __post_init__(self) -> None:
        table = self.program.table
        num_sends = int((table.kinds == Kind.SEND).sum())
        expected = {"starts": len(table.codes), "ends": len(table.codes), "sent": num_sends, "arrived": num_sends}
        for name, length in expected.items():
            if (entries := len(getattr(self, name))) != length:
                raise ScheduleError(f"{name} does not match the program", entries=entries, expected=length)
        if len(self.memory) != self.program.num_ranks:
            raise ScheduleError("there must be one memory curve per rank", curves=len(self.memory), ranks=len(table))
        starts, ends, sent, arrived = (each.values for each in (self.starts, self.ends, self.sent, self.arrived))
        _refuse("start must be finite seconds, 0 or more", ~(np.isfinite(starts) & (starts >= 0)), start=starts)
        _refuse("end must be finite seconds, not before start", ~_in_order(starts, ends), start=starts, end=ends)
        _refuse("a message must not arrive before it is sent", ~_in_order(sent, arrived), sent=sent, arrived=arrived)
        for name, times in (("end", ends), ("arrived", arrived)):
            _refuse(f"{name} must be at most {_MAX_SECONDS:g} seconds", times > _MAX_SECONDS, seconds=times)

    def __repr__(self) -> str:
        # Short, for consoles and notebooks: the fields hold the times of every action.
        step = f"step {seconds_text(self.makespan)}, bubble {percent_text(self.bubble)}"
        return f"Trace({self.num_ranks} ranks, {len(self.starts)} actions, {step})"

    def _repr_html_(self) -> str:
        return timeline(self)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every action of every rank with its times, rank by rank in order."""
        ranks, actions = self.program.table.rank_of.tolist(), (a for order in self.program.orders for a in order)
        return tuple(map(Span, ranks, actions, self.starts, self.ends))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every message with its times."""
        sends = ((span.rank, span.action) for span in self.spans if isinstance(span.action, Send))
        return tuple(
            Transfer(rank, self.program.placement[action.peer], action, start, end)
            for (rank, action), start, end in zip(sends, self.sent, self.arrived, strict=True)
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.program.num_ranks

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the step to the end of its last action: the length of a synchronous step."""
        return float(self.ends.values.max(initial=0.0))

    @cached_property
    def _compute(self) -> Bools:
        return np.isin(self.program.table.kinds, COMPUTE_KINDS)

    @cached_property
    def durations(self) -> Floats:
        """Seconds of every action."""
        return self.ends.values - self.starts.values

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds of compute of every rank."""
        busy = np.where(self._compute, self.durations, 0.0)
        return tuple(np.bincount(self.program.table.rank_of, busy, self.num_ranks).tolist())

    @cached_property
    def stage_seconds(self) -> tuple[float, ...]:
        """Seconds of compute of every stage; an overlapped pair counts for the stage of the forward."""
        table, busy = self.program.table, np.where(self._compute, self.durations, 0.0)
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
        """The idle time of every rank by cause."""
        busiest = max(self.work)
        parts = []
        for work, (first, last) in zip(self.work, self.windows, strict=True):
            inside = max(0.0, last - first - work)
            imbalance = min(inside, busiest - work)
            parts.append(Idle(first, inside - imbalance, imbalance, self.makespan - last))
        return tuple(parts)

    @property
    def idle_shares(self) -> Idle:
        """Each cause's share of all ranks' time; they add up to the bubble."""
        capacity = self.num_ranks * self.makespan or 1.0
        return Idle(*(sum(seconds) / capacity for seconds in zip(*self.idle, strict=True)))

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that the rank holds at any time.

        Args:
            rank: a rank of the pipeline
        """
        if not 0 <= rank < self.num_ranks:
            raise ScheduleError("no such rank", rank=rank, ranks=self.num_ranks)
        return self.memory[rank].peak


def _in_order(starts: Floats, ends: Floats) -> Bools:
    """Where both times are finite and the end is not before the start."""
    return np.asarray(np.isfinite(starts) & np.isfinite(ends) & (ends >= starts))


def _refuse(problem: str, wrong: Bools, **columns: Floats) -> None:
    """Raise if any entry is wrong, with the index and the values of the first."""
    if wrong.any():
        index = int(np.argmax(wrong))
        values = {name: float(column[index]) for name, column in columns.items()}
        raise ScheduleError(problem, index=index, hint="", **values)


def _idle_share(work: float, capacity: float) -> float:
    return 1.0 - work / capacity if capacity else 0.0


def critical_path(trace: Trace) -> tuple[Span | Transfer, ...]:
    """The chain of passes and messages that determines the length of a step, from its first item to its last.

    An item follows the one that it waited for: of the item before it on its rank or link and the passes and messages
    that it needs, the one that ended last. A rank that was idle without cause (in a recorded trace) leaves a gap.
    """
    program, table, num_actions = trace.program, trace.program.table, len(trace.starts)
    if not num_actions:
        return ()
    # Items are numbered: first all actions by their index, then all messages.
    starts = np.concatenate((trace.starts.values, trace.sent.values))
    ends = np.concatenate((trace.ends.values, trace.arrived.values))
    sends = np.flatnonzero(table.kinds == Kind.SEND)
    message_of = {code: num_actions + number for number, code in enumerate(table.codes[sends].tolist())}
    # Per action the nearest earlier action of its rank that took time or is a pass; -1 if there is none.
    has_duration = np.isin(table.kinds, COMPUTE_KINDS) | (trace.durations > 0)
    nearest = np.maximum.accumulate(np.where(has_duration, np.arange(num_actions), -1))
    above = np.concatenate(([-1], nearest[:-1]))
    before_on_rank = np.where(above >= table.starts[table.rank_of], above, -1)
    # Per message the message before it on the same link; -1 if there is none.
    ranks = np.asarray(program.placement.ranks)
    link = table.rank_of[sends] * trace.num_ranks + ranks[peer_of(table.codes[sends])]
    by_link = np.argsort(link, kind="stable")
    before_on_link = np.full(len(sends), -1, dtype=np.int64)
    same = link[by_link][1:] == link[by_link][:-1]
    before_on_link[by_link[1:][same]] = by_link[:-1][same] + num_actions

    def last_before(index: int, latest: float) -> int:
        """The nearest earlier action of the rank that had ended by then; a rank may do several things at once."""
        before = int(before_on_rank[index])
        while before >= 0 and ends[before] > latest:
            before = int(before_on_rank[before])
        return before

    def needed(index: int) -> Iterator[int]:
        action = table.action(index)
        for part in action.parts if isinstance(action, ComputeAction | Overlap) else ():
            for fact, stage, microbatch in needs(part, program.cuts):
                if program.placement[stage] == program.placement[part.stage]:
                    yield int(program.makers[fact][stage, microbatch])
                else:
                    yield message_of.get(int(pack(Kind.SEND, stage, microbatch, part.stage)[0]), -1)

    last_end = np.flatnonzero(trace.ends.values == trace.ends.values.max())
    lasting = last_end[has_duration[last_end]]
    item = int((lasting if len(lasting) else last_end)[0])
    path: list[Span | Transfer] = []
    seen: set[int] = set()
    while item >= 0 and item not in seen:
        seen.add(item)
        start, end = float(starts[item]), float(ends[item])
        latest = start + _TOLERANCE * trace.makespan
        if item < num_actions:
            path.append(Span(int(table.rank_of[item]), table.action(item), start, end))
            earlier = [last_before(item, latest), *needed(item)]
        else:
            send = int(sends[item - num_actions])
            action = table.action(send)
            assert isinstance(action, Send)
            path.append(Transfer(int(ranks[action.stage]), int(ranks[action.peer]), action, start, end))
            earlier = [last_before(send, latest), int(before_on_link[item - num_actions])]
        # Of the items that this one had to wait for, the one that ended last.
        found = [other for other in earlier if other >= 0 and ends[other] <= latest]
        item = max(found, key=lambda other: (ends[other], starts[other], other), default=-1)
    return tuple(reversed(path))
