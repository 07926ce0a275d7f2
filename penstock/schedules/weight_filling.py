"""Moves weight gradients into the gaps that measured costs leave, if that makes the step shorter.

Forwards and input gradients keep their order. A rank that would wait for its next pass runs a pending weight gradient
instead; one that has no memory for the next forward runs weight gradients first. No rank ever holds more activations
than before.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.ir import (
    Kind,
    Length,
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


def move_weight_grads(schedule: Schedule, costs: StageCosts) -> Schedule:
    """The fastest of the schedule and its variants with weight gradients moved; the costs are of its stages."""
    costs.check_microbatches(schedule.num_microbatches)
    actions = _action_table(schedule, costs)
    given = schedule_length(schedule, costs)
    variants = [(given, schedule), *(_fill(schedule, actions, patience) for patience in _PATIENCE)]
    # Shorter in one measure must not be longer in the other.
    return min((each for each in variants if each[0].span <= given.span), key=lambda each: each[0])[1]


class _ActionTable(NamedTuple):
    """Properties of every action, by index; `weight_...` is about the weight gradient of its stage."""

    kinds: list[int]
    needs: list[int]
    """the action that must have ended on another rank, by its index; -1: none"""
    seconds: list[float]
    weight_seconds: list[float]
    allocated: list[float]
    """bytes allocated, or freed if below 0"""
    weight_allocated: list[float]


def _action_table(schedule: Schedule, costs: StageCosts) -> _ActionTable:
    table = schedule.table
    stages = stage_of(table.codes)
    columns = microbatch_of(table.codes) if costs.num_microbatches else 0
    if not costs.allocated(Kind.FORWARD).any():
        # Without bytes, activations of all stages count as equal: no rank may hold more of them than before.
        equal = (1,) * costs.num_stages
        costs = replace(costs, activation_bytes=equal, weight_grad_bytes=equal)
    allocated = np.zeros((len(Kind), *costs.allocated(Kind.FORWARD).shape))
    for kind in (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
        allocated[kind] = costs.allocated(kind)
    return _ActionTable(
        table.kinds.tolist(),
        find_waits(table, schedule.dependencies()).one,
        pass_seconds(table, costs).tolist(),
        costs.seconds(Kind.WEIGHT_GRAD)[stages, columns].tolist(),
        allocated[table.kinds, stages, columns].tolist(),
        allocated[Kind.WEIGHT_GRAD][stages, columns].tolist(),
    )


@dataclass(slots=True)
class _Rank:
    """State of one rank: remaining passes in order, pending weight gradients, bytes held, and passes done, by index."""

    fixed: deque[int]
    limit: float
    clock: float = 0.0
    held: float = 0.0
    pending: deque[int] = field(default_factory=deque)
    done: list[int] = field(default_factory=list)


def _fill(schedule: Schedule, actions: _ActionTable, patience: float) -> tuple[Length, Schedule]:
    """One greedy run over all ranks in the order of their clocks, and its length, as `schedule_length` has it."""
    table, ranks = schedule.table, []
    for first, end in pairwise(table.starts.tolist()):
        fixed = first + np.flatnonzero(table.kinds[first:end] != Kind.WEIGHT_GRAD)
        ranks.append(_Rank(deque(fixed.tolist()), float(np.cumsum(actions.allocated[first:end]).max())))
    kinds, needs, seconds, weight_seconds, allocated, weight_allocated = actions
    ends = [inf] * len(kinds)
    # By action, the rank that waits for it: only one can, as in a chain of stages values go to one other stage.
    waiting: dict[int, int] = {}
    queue = [(0.0, number) for number in range(len(ranks))]
    # Plain lists and few calls: orders of large problems spend their time in this loop.
    while queue:
        _, number = heappop(queue)
        rank = ranks[number]
        while True:
            if not rank.fixed:
                for index in rank.pending:
                    rank.done.append(-1 - index)
                    rank.clock += weight_seconds[index]
                break
            index = rank.fixed[0]
            need, bytes_of_next = needs[index], allocated[index]
            ready = 0.0 if need == -1 else ends[need]
            is_full = bytes_of_next > 0 and rank.held + bytes_of_next > rank.limit
            # A weight gradient runs in a gap that it fills at least in part, or to free memory.
            if rank.pending and (is_full or ready - rank.clock > patience * weight_seconds[rank.pending[0]]):
                index = rank.pending.popleft()
                rank.done.append(-1 - index)
                rank.clock += weight_seconds[index]
                rank.held += weight_allocated[index]
            elif ready < inf:
                rank.fixed.popleft()
                rank.done.append(index)
                clock = rank.clock = (ready if ready > rank.clock else rank.clock) + seconds[index]
                rank.held += bytes_of_next
                if kinds[index] == Kind.INPUT_GRAD:
                    rank.pending.append(index)
                ends[index] = clock
                if index in waiting:
                    waiter = waiting.pop(index)
                    heappush(queue, (max(clock, ranks[waiter].clock), waiter))
            else:
                waiting[need] = number
                break
            if queue and queue[0] < (rank.clock, number):
                heappush(queue, (rank.clock, number))
                break
    # A rank begins with a forward, so its first action is not a weight gradient that was moved.
    spans = [rank.clock - ends[rank.done[0]] + seconds[rank.done[0]] for rank in ranks]
    length = Length(max(rank.clock for rank in ranks), max(spans))
    codes = table.codes
    # A weight gradient is stored as -1 - (index of its input gradient).
    weights = codes - Kind.INPUT_GRAD + Kind.WEIGHT_GRAD
    done = [np.asarray(rank.done, dtype=np.int64) for rank in ranks]
    orders = Orders([np.where(index < 0, weights[-1 - index], codes[index]) for index in done])
    return length, Schedule(schedule.placement, schedule.num_microbatches, orders)
