"""Weights: moves weight gradients into the gaps that measured costs leave, if the step gets shorter by it.

Forwards and input gradients keep their order. A rank that would wait for its next pass runs a pending weight gradient
instead; one that has no room for the next forward runs weight gradients first. No rank ever holds more than before.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import inf

import numpy as np

from penstock.errors import CostError
from penstock.ir.action import Kind
from penstock.ir.code import stage_of
from penstock.ir.costs import StageCosts
from penstock.ir.orders import Orders
from penstock.ir.schedule import Schedule
from penstock.ir.timing import chain_links, makespan, pass_seconds, waits

_PATIENCE = (0.0, 0.5, 1.0)
"""candidates for how much of a weight gradient's time a rank rather waits than starts one"""


def refill(schedule: Schedule, costs: StageCosts) -> Schedule:
    """The fastest of the schedule and its variants with weight gradients moved."""
    if costs.num_stages != schedule.num_stages:
        raise CostError("costs are for another number of stages", costs=costs.num_stages, schedule=schedule.num_stages)
    variants = (schedule, *(_Filling(schedule, costs, patience).run() for patience in _PATIENCE))
    return min(variants, key=lambda variant: makespan(variant, costs))


@dataclass
class _Rank:
    """Where one rank is: what it still has to do in order, what it may do in gaps, what it holds. All by index."""

    fixed: deque[int]
    limit: float
    clock: float = 0.0
    held: float = 0.0
    pending: deque[int] = field(default_factory=deque)
    done: list[int] = field(default_factory=list)


class _Filling:
    """One greedy run over all ranks in the order of their clocks."""

    def __init__(self, schedule: Schedule, costs: StageCosts, patience: float) -> None:
        table = schedule.table
        stages = stage_of(table.codes)
        sizes = costs.activation_bytes if any(costs.activation_bytes) else (1,) * costs.num_stages
        self.schedule, self.patience = schedule, patience
        self.needs = waits(table, chain_links(schedule)).one
        self.seconds = pass_seconds(table, costs).tolist()
        self.weight_seconds = np.asarray(costs.weight_grad)[stages].tolist()
        self.sizes = np.where(table.kinds == Kind.FORWARD, 1.0, -1.0) * np.asarray(sizes, dtype=float)[stages]
        self.ends = [inf] * len(table.codes)
        self.waiting: dict[int, int] = {}
        self.ranks = [self._rank(rank) for rank in range(schedule.num_ranks)]
        self.queue = [(0.0, rank) for rank in range(schedule.num_ranks)]

    def _rank(self, rank: int) -> _Rank:
        table = self.schedule.table
        index = np.arange(*table.starts[rank : rank + 2])
        kinds = table.kinds[index]
        changes = np.where(kinds == Kind.INPUT_GRAD, 0.0, self.sizes[index])
        return _Rank(deque(index[kinds != Kind.WEIGHT_GRAD].tolist()), float(np.cumsum(changes).max()))

    def run(self) -> Schedule:
        """The schedule that the run ends with."""
        while self.queue:
            _, number = heapq.heappop(self.queue)
            self._step(number, self.ranks[number])
        codes = self.schedule.table.codes
        # A weight gradient was noted as -1 - (index of its input gradient).
        weights = codes - Kind.INPUT_GRAD + Kind.WEIGHT_GRAD
        done = [np.asarray(rank.done, dtype=np.int64) for rank in self.ranks]
        table = Orders([np.where(index < 0, weights[-1 - index], codes[index]) for index in done])
        return Schedule(self.schedule.placement, self.schedule.num_microbatches, table)

    def _step(self, number: int, rank: _Rank) -> None:
        """Do the next thing on a rank, or let it wait for another."""
        if not rank.fixed:
            rank.done += [-1 - index for index in rank.pending]
            return
        index = rank.fixed[0]
        need = self.needs[index]
        ready = 0.0 if need == -1 else self.ends[need]
        is_full = self.sizes[index] > 0 and rank.held + self.sizes[index] > rank.limit
        if rank.pending and (is_full or self._is_worth_a_weight(rank, ready)):
            self._run_weight(number, rank)
        elif ready < inf:
            self._run_fixed(number, rank, ready)
        else:
            self.waiting[need] = number

    def _is_worth_a_weight(self, rank: _Rank, ready: float) -> bool:
        return bool(ready - rank.clock > self.patience * self.weight_seconds[rank.pending[0]])

    def _run_weight(self, number: int, rank: _Rank) -> None:
        index = rank.pending.popleft()
        rank.done.append(-1 - index)
        rank.clock += self.weight_seconds[index]
        rank.held += self.sizes[index]
        heapq.heappush(self.queue, (rank.clock, number))

    def _run_fixed(self, number: int, rank: _Rank, ready: float) -> None:
        index = rank.fixed.popleft()
        rank.done.append(index)
        rank.clock = max(rank.clock, ready) + self.seconds[index]
        if self.sizes[index] > 0:
            rank.held += self.sizes[index]
        else:
            rank.pending.append(index)
        self.ends[index] = rank.clock
        heapq.heappush(self.queue, (rank.clock, number))
        if index in self.waiting:
            waiter = self.waiting.pop(index)
            heapq.heappush(self.queue, (max(rank.clock, self.ranks[waiter].clock), waiter))
