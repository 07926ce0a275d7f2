"""Moves weight gradients into the gaps that measured costs leave, if that makes the step shorter.

Forwards and input gradients keep their order. A rank that would wait for its next pass runs a pending weight gradient
instead; one that has no memory for the next forward runs weight gradients first. No rank ever holds more activations
than before.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.ir import (
    Kind,
    Orders,
    Schedule,
    StageCosts,
    find_waits,
    microbatch_of,
    pass_seconds,
    schedule_length,
    stage_of,
)

_PATIENCE = (0.0, 0.5, 1.0)
"""a rank waits up to this share of a weight gradient's time before it starts one; each is tried"""


def refill(schedule: Schedule, costs: StageCosts) -> Schedule:
    """The fastest of the schedule and its variants with weight gradients moved; the costs are of its stages."""
    costs.check_microbatches(schedule.num_microbatches)
    actions = _action_table(schedule, costs)
    variants = (schedule, *(_GreedyFill(schedule, actions, patience).run() for patience in _PATIENCE))
    lengths = [schedule_length(variant, costs) for variant in variants]
    # Shorter in one measure must not be longer in the other.
    allowed = [place for place, found in enumerate(lengths) if found.span <= lengths[0].span]
    return variants[min(allowed, key=lambda place: lengths[place])]


class _ActionTable(NamedTuple):
    """Properties of every action, by index; `weight_...` is about the weight gradient of its stage."""

    kinds: list[int]
    needs: list[int]
    seconds: list[float]
    weight_seconds: list[float]
    allocated: list[float]
    """bytes allocated, or freed if below 0"""
    weight_taken: list[float]


def _action_table(schedule: Schedule, costs: StageCosts) -> _ActionTable:
    table = schedule.table
    stages = stage_of(table.codes)
    columns = microbatch_of(table.codes) if costs.num_microbatches else 0
    kept, late = (costs.by_microbatch(name) for name in ("activation_bytes", "weight_grad_bytes"))
    if not kept.any():
        kept = late = np.ones_like(kept)
    allocated = np.zeros((len(Kind), *kept.shape))
    allocated[Kind.FORWARD], allocated[Kind.INPUT_GRAD], allocated[Kind.WEIGHT_GRAD] = kept, late - kept, -late
    return _ActionTable(
        table.kinds.tolist(),
        find_waits(table, schedule.dependencies()).one,
        pass_seconds(table, costs).tolist(),
        costs.by_microbatch("weight_grad")[stages, columns].tolist(),
        allocated[table.kinds, stages, columns].tolist(),
        (-late[stages, columns]).tolist(),
    )


@dataclass
class _Rank:
    """State of one rank: remaining passes in order, pending weight gradients, bytes held, and passes done, by index."""

    fixed: deque[int]
    limit: float
    clock: float = 0.0
    held: float = 0.0
    pending: deque[int] = field(default_factory=deque)
    done: list[int] = field(default_factory=list)


class _GreedyFill:
    """One greedy run over all ranks in the order of their clocks."""

    def __init__(self, schedule: Schedule, actions: _ActionTable, patience: float) -> None:
        self.schedule, self.actions, self.patience = schedule, actions, patience
        self.ends = [inf] * len(schedule.table.codes)
        self.waiting: dict[int, int] = {}
        self.ranks = [self._rank(rank) for rank in range(schedule.num_ranks)]
        self.queue = [(0.0, rank) for rank in range(schedule.num_ranks)]

    def _rank(self, rank: int) -> _Rank:
        table = self.schedule.table
        first, end = table.starts[rank : rank + 2].tolist()
        fixed = first + np.flatnonzero(table.kinds[first:end] != Kind.WEIGHT_GRAD)
        return _Rank(deque(fixed.tolist()), float(np.cumsum(self.actions.allocated[first:end]).max()))

    def run(self) -> Schedule:
        """Run all ranks to their end and return the new schedule."""
        while self.queue:
            _, number = heapq.heappop(self.queue)
            self._step(number, self.ranks[number])
        codes = self.schedule.table.codes
        # A weight gradient is stored as -1 - (index of its input gradient).
        weights = codes - Kind.INPUT_GRAD + Kind.WEIGHT_GRAD
        done = [np.asarray(rank.done, dtype=np.int64) for rank in self.ranks]
        table = Orders([np.where(index < 0, weights[-1 - index], codes[index]) for index in done])
        return Schedule(self.schedule.placement, self.schedule.num_microbatches, table)

    def _step(self, number: int, rank: _Rank) -> None:
        """Run the next pass of a rank, or let it wait for another rank."""
        if not rank.fixed:
            rank.done += [-1 - index for index in rank.pending]
            return
        index = rank.fixed[0]
        need, allocated = self.actions.needs[index], self.actions.allocated[index]
        ready = 0.0 if need == -1 else self.ends[need]
        is_full = allocated > 0 and rank.held + allocated > rank.limit
        gap = ready - rank.clock
        # A weight gradient runs in a gap that it fills at least in part, or to free memory.
        if rank.pending and (is_full or gap > self.patience * self.actions.weight_seconds[rank.pending[0]]):
            self._run_weight(number, rank)
        elif ready < inf:
            self._run_fixed(number, rank, ready)
        else:
            self.waiting[need] = number

    def _run_weight(self, number: int, rank: _Rank) -> None:
        index = rank.pending.popleft()
        rank.done.append(-1 - index)
        rank.clock += self.actions.weight_seconds[index]
        rank.held += self.actions.weight_taken[index]
        heapq.heappush(self.queue, (rank.clock, number))

    def _run_fixed(self, number: int, rank: _Rank, ready: float) -> None:
        index = rank.fixed.popleft()
        rank.done.append(index)
        rank.clock = max(rank.clock, ready) + self.actions.seconds[index]
        rank.held += self.actions.allocated[index]
        if self.actions.kinds[index] == Kind.INPUT_GRAD:
            rank.pending.append(index)
        self.ends[index] = rank.clock
        heapq.heappush(self.queue, (rank.clock, number))
        if index in self.waiting:
            waiter = self.waiting.pop(index)
            heapq.heappush(self.queue, (max(rank.clock, self.ranks[waiter].clock), waiter))
