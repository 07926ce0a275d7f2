"""Runs orders to their end, or to the point where they block: the one loop behind lowering, verify and simulate.

A *line* runs its items one after another; an item may also need items of other lines. Ranks are lines of actions, links
are lines of messages. Every item is visited once, plus once each time its line waits for it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.ir.action import PASS_KINDS, Kind
from penstock.ir.costs import StageCosts
from penstock.ir.orders import Dependencies, Floats, Ints, Orders, microbatch_of, peer_microbatch_of, peer_of, stage_of
from penstock.ir.schedule import Schedule


@dataclass(frozen=True)
class Walk:
    """When each item ended, and where each unfinished line is blocked.

    `ends` is -1 for items that never ran; `blocked` maps a line to (its next item, the item that one waits for).
    """

    ends: Floats
    blocked: dict[int, tuple[int, int]]

    @property
    def finished(self) -> bool:
        """Whether every line reached its end."""
        return not self.blocked


class Needs(NamedTuple):
    """Per item the item it needs: -1 for none, -2 if it needs several, which are in `several`.

    Most items need at most one, so a flat list of ints keeps the loop of `walk` fast.
    """

    one: list[int]
    several: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, num_items: int, waiter: Ints, needed: Ints) -> "Needs":
        """The needs of pairs (waiting item, needed item)."""
        needs_several = np.bincount(waiter, minlength=num_items) > 1
        one = np.full(num_items, -1, dtype=np.int64)
        one[waiter] = needed
        one[needs_several] = -2
        rows = np.flatnonzero(needs_several[waiter])
        rows = rows[np.argsort(waiter[rows], kind="stable")]
        items, first = np.unique(waiter[rows], return_index=True)
        groups, edges = needed[rows].tolist(), pairwise([*first.tolist(), len(rows)])
        several = {item: tuple(groups[low:high]) for item, (low, high) in zip(items.tolist(), edges, strict=True)}
        return cls(one.tolist(), several)


def walk(
    starts: Sequence[int], needs: Needs, seconds: Sequence[float] | None = None, tails: Sequence[float] | None = None
) -> Walk:
    """Run every item as early as possible. Line k holds the items starts[k] .. starts[k + 1].

    An item occupies its line for `seconds` (0 if not given); items that need it can start `tails` seconds later.
    """
    num_items, num_lines = starts[-1], len(starts) - 1
    one, several = needs
    seconds = seconds or [0.0] * num_items
    tails = tails or [0.0] * num_items
    ends = [-1.0] * num_items
    heads, clocks = list(starts[:-1]), [0.0] * num_lines
    # The line that began to wait for an item last, and, for each waiting line, the one that waited before it.
    waiting, before = [-1] * num_items, [-1] * num_lines
    # First in, first out: by the time a line gets its turn, more of what it waits for is done, so it blocks less often.
    runnable = deque(range(num_lines))
    while runnable:
        line = runnable.popleft()
        now = clocks[line]
        # Plain lists and no calls: programs of a million actions spend their time in this loop.
        for item in range(heads[line], starts[line + 1]):
            need, ready = one[item], 0.0
            if need >= 0:
                ready = ends[need]
            elif need == -2:
                for need in several[item]:
                    ready = ends[need]
                    if ready < 0.0:
                        break
                    if ready > now:
                        now = ready
            if ready < 0.0:
                before[line], waiting[need] = waiting[need], line
                heads[line], clocks[line] = item, now
                break
            if ready > now:
                now = ready
            now += seconds[item]
            ends[item] = now + tails[item]
            waiter = waiting[item]
            while waiter >= 0:
                runnable.append(waiter)
                waiter = before[waiter]
        else:
            heads[line] = starts[line + 1]
    blocked = {}
    for line, item in enumerate(heads):
        if item < starts[line + 1]:
            needed = several[item] if one[item] == -2 else (one[item],)
            blocked[line] = item, next(need for need in needed if ends[need] < 0.0)
    return Walk(np.asarray(ends), blocked)


def pass_seconds(table: Orders, costs: StageCosts, overlap: float = 0.0) -> Floats:
    """Seconds of every action, 0 if it does not compute. An overlapped pair hides `overlap` of its shorter half."""
    by_kind = np.zeros((len(Kind), costs.num_stages, costs.num_microbatches or 1))
    for kind in PASS_KINDS:
        by_kind[kind] = costs.seconds(kind)
    return look_up_seconds(table, by_kind, overlap)


def look_up_seconds(table: Orders, by_kind: Floats, overlap: float = 0.0) -> Floats:
    """Seconds of every action, from those by kind, stage and microbatch; one column holds for all microbatches."""
    width = by_kind.shape[2]

    def column(microbatch: Ints) -> Ints | int:
        return 0 if width == 1 else microbatch

    seconds = by_kind[table.kinds, stage_of(table.codes), column(microbatch_of(table.codes))]
    pairs = table.kinds == Kind.OVERLAP
    codes = table.codes[pairs]
    forward = by_kind[Kind.FORWARD, stage_of(codes), column(microbatch_of(codes))]
    backward = by_kind[Kind.BACKWARD, peer_of(codes), column(peer_microbatch_of(codes))]
    seconds[pairs] = forward + backward - overlap * np.minimum(forward, backward)
    return np.asarray(seconds)


def find_waits(table: Orders, dependencies: Dependencies) -> Needs:
    """Per action the actions that it has to wait for: those of other ranks, and later ones of its own rank.

    Earlier actions of its own rank are done anyway, as a rank runs its actions in order.
    """
    rank = table.rank_of
    waiter, needed = dependencies.waiter, dependencies.needed
    waits = (rank[waiter] != rank[needed]) | (needed >= waiter)
    return Needs.of(len(table.codes), waiter[waits], needed[waits])


def walk_passes(table: Orders, dependencies: Dependencies, seconds: Floats | None = None) -> Walk:
    """Run compute actions as early as their order and their dependencies allow, with messages that take no time."""
    return walk(table.starts.tolist(), find_waits(table, dependencies), None if seconds is None else seconds.tolist())


class Length(NamedTuple):
    """Length of a step: its makespan, and the longest time from first start to last end on one rank."""

    makespan: float
    span: float


def schedule_length(schedule: Schedule, costs: StageCosts) -> Length:
    """Length of one step over a chain of stages whose messages take no time."""
    table = schedule.table
    costs.check_microbatches(schedule.num_microbatches)
    seconds = pass_seconds(table, costs)
    ends = walk_passes(table, schedule.dependencies(), seconds).ends
    first, last = table.starts[:-1], table.starts[1:] - 1
    return Length(float(ends.max()), float((ends[last] - ends[first] + seconds[first]).max()))
