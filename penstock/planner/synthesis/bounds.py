"""Seconds that no order can undercut, with the reason.

The bound is the largest of these:

- *path*: a pass, all passes that must come before it and all that must come after it;
- *work*: a rank computes all the time except where it cannot. It cannot before its first values arrive nor, once its
  memory is full, before the first gradients return; mirrored in time, the same holds for its end. Up to a moment t a
  rank has done at most the passes that can have started by then and fit in its memory; if those up to t and those of
  the last u seconds are not all of its passes, a step takes t + u and the rest;
- *memory* (Little's law): bytes x seconds that microbatches hold, over the bytes that there are.

For spans, each rank is considered alone, with the least time that other ranks need between two of its passes.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import floor, gcd, inf
from typing import NamedTuple

import numpy as np

from penstock.planner.synthesis.pass_table import Floats, Ints, PassNeed, PassTable
from penstock.planner.synthesis.problem import FlatProblem, ScheduleProblem

_CAUTION = 1e-9
"""the share of a bound that may be due to rounding"""
_MACHINE_PASSES = 20_000
"""passes that are compared with the work of their rank; later ones only with their needs"""
_MACHINE_DEPTH = 48
"""passes of a row that this considers, the latest ones"""


class Bound(NamedTuple):
    """No order takes fewer seconds, because of `why`."""

    seconds: float
    why: str


def lower_bound(problem: ScheduleProblem) -> Bound:
    """Returns the proven bound of a problem in its objective."""
    flat = FlatProblem.of(problem)
    table = PassTable.least(flat)
    if problem.objective == "makespan":
        found = _bounds(table, range(flat.num_ranks))
        cores = problem.cluster.cores
        if cores is not None and cores < flat.num_ranks:
            work = table.share * float(table.seconds.sum()) * flat.num_microbatches
            found.append(Bound(work / cores, f"work of all ranks on {cores} cores"))
    else:
        found = [each for rank in range(flat.num_ranks) for each in _bounds(_alone(table, rank), (rank,))]
    best = max(found)
    return Bound(best.seconds * (1 - _CAUTION), best.why)


def _bounds(table: PassTable, ranks: Iterable[int]) -> list[Bound]:
    mirrored = table.mirrored()
    begin, end = earliest_starts(table), earliest_starts(mirrored)
    found = []
    for rank in ranks:
        mine = list(table.of_rank[rank])
        path = (begin[mine] + table.seconds[mine, None] + end[mine][:, ::-1]).max()
        total = table.share * table.seconds[mine].sum() * table.flat.num_microbatches
        busy = _busy_bound(total, _idle(table, begin, rank), _idle(mirrored, end, rank))
        found.append(Bound(float(path), f"path through rank {rank}"))
        found.append(Bound(busy, f"work and forced idle time of rank {rank}"))
        found.append(Bound(_littles_law(table, begin, end, rank), f"memory of rank {rank}"))
    return found


def _alone(table: PassTable, rank: int) -> PassTable:
    """The rows of one rank only, with the passes of other ranks between them as delays."""
    mine = table.of_rank[rank]
    needs = []
    for row in mine:
        delays = table.least_delays(row)
        needs += [
            PassNeed(other, row, latency=float(delays[other] - table.seconds[row]))
            for other in mine
            if other != row and delays[other] > -inf
        ]
    return replace(table, needs=tuple(needs))


class _Before(NamedTuple):
    """Predecessors of pass k of a row: (needed row, seconds between), (row, shift), and (row, shift) on its rank."""

    needs: list[tuple[int, float]]
    lags: list[tuple[int, int]]
    machine: list[tuple[int, int]]


def earliest_starts(table: PassTable) -> Floats:
    """Returns by row and microbatch a moment before which no order can start the pass; it never falls along a row.

    A pass starts after the passes that it needs, the previous pass of its row and those that must free memory for it,
    and after its rank has had time for all passes that must precede it there. The last condition is single-machine
    scheduling with release times: passes released from some moment on are worked off after that moment.
    """
    befores = _befores(table)
    columns_held = _MACHINE_PASSES // max(table.num_rows, 1)
    seconds, work = table.seconds.tolist(), table.share * table.seconds
    first = table.before[table.rank].tolist()
    result = np.zeros((table.num_rows, table.flat.num_microbatches))
    # Scalars are read from lists, which is faster, and slices from the array.
    found: list[list[float]] = [[] for _ in seconds]
    for column in range(table.flat.num_microbatches):
        for row in table.sequence:
            needs, lags, machine = befores[row]
            earliest = found[row][-1] + seconds[row] if column else first[row]
            for needed, gap in needs:
                earliest = max(earliest, found[needed][column] + gap)
            for needed, shift in lags:
                if column >= shift:
                    earliest = max(earliest, found[needed][column - shift] + seconds[needed])
            if column < columns_held and len(machine) > 1:
                earliest = max(earliest, _machine_end(result, work, machine, column))
            found[row].append(earliest)
            result[row, column] = earliest
    return result


def _befores(table: PassTable) -> list[_Before]:
    demands = memory_lags(table)
    result = []
    for row in range(table.num_rows):
        mine = table.of_rank[int(table.rank[row])]
        shifts = {other: 0 for other in mine if other != row and table.precedes[other, row]} | {row: 1}
        for lag in demands:
            if table.precedes[lag.row, row] and lag.needed in mine:
                for other in mine:
                    if table.precedes[other, lag.needed]:
                        shifts[other] = min(shifts.get(other, lag.shift), lag.shift)
        result.append(
            _Before(
                [(need.needed, float(table.seconds[need.needed]) + need.lag) for need in table.needed_by[row]],
                [(lag.needed, lag.shift) for lag in demands if lag.row == row],
                list(shifts.items()),
            )
        )
    return result


def _machine_end(starts: Floats, work: Floats, before: list[tuple[int, int]], column: int) -> float:
    """When a rank can have run everything that must come before a pass, and nothing else."""
    released, amounts = [], []
    for row, shift in before:
        last = column + 1 - shift
        if last > 0:
            part = starts[row, max(last - _MACHINE_DEPTH, 0) : last]
            released.append(part)
            amounts.append(np.full(len(part), work[row]))
    if not released:
        return 0.0
    moments = np.concatenate(released)
    latest_first = np.argsort(-moments, kind="stable")
    return float((moments[latest_first] + np.cumsum(np.concatenate(amounts)[latest_first])).max())


class Lag(NamedTuple):
    """Pass k of `row` starts after pass k - shift of `needed` has ended."""

    row: int
    needed: int
    shift: int


def memory_lags(table: PassTable) -> tuple[Lag, ...]:
    """Returns the dependencies between passes of a rank that its memory limit implies.

    - *Room.* When a pass starts, the passes that allocate before it have run for its microbatch and all earlier ones.
      Bytes above the room must have been freed by passes of earlier microbatches, which in turn need others.
    - *Escape.* The bytes of a microbatch are freed only after all its allocating passes on the rank have run. A row
      that runs too far ahead of another would block the other for ever.
    """
    room = table.flat.room
    return tuple(
        lag
        for rank, mine in enumerate(table.of_rank)
        if room[rank] < inf
        for row in mine
        for lag in (*_room_lags(table, row, room[rank]), *_escape_lags(table, row, room[rank]))
    )


def _room_lags(table: PassTable, row: int, room: float) -> list[Lag]:
    mine = table.of_rank[int(table.rank[row])]
    held: dict[int, float] = {}
    for taker in mine:
        if table.taken[taker] > 0 and table.precedes[taker, row]:
            held[taker // 3] = held.get(taker // 3, 0.0) + float(table.taken[taker])
    given = {g: size for stage, total in held.items() for g, size in _freed_after(table, row, stage, total).items()}
    total = sum(held[stage] for stage in {giver // 3 for giver in given})
    found = []
    for needed in mine:
        if needed == row or not table.precedes[row, needed]:
            continue
        freed = sum(given[giver] for giver in given if table.precedes[needed, giver])
        if freed > 0:
            found.append(Lag(row, needed, max(floor((room - total) / freed) + 1, 1)))
    return found


def _freed_after(table: PassTable, row: int, stage: int, total: float) -> dict[int, float]:
    """Rows that free, after `row`, the bytes that a stage took up to it; empty if some may be freed before it."""
    givers = {3 * stage + part: -float(table.taken[3 * stage + part]) for part in range(3)}
    givers = {giver: size for giver, size in givers.items() if size > 0}
    if not all(table.precedes[row, giver] for giver in givers):
        return {}
    # A stage that allocates in two steps may have done only one of them by now.
    excess = sum(givers.values()) - total
    return {giver: max(size - excess, 0.0) for giver, size in givers.items()}


def _escape_lags(table: PassTable, row: int, room: float) -> list[Lag]:
    if table.taken[row] <= 0:
        return []
    mine = table.of_rank[int(table.rank[row])]
    givers = [giver for giver in range(row // 3 * 3, row // 3 * 3 + 3) if table.taken[giver] < 0]
    others = [
        taker
        for taker in mine
        if taker != row and table.taken[taker] > 0 and all(table.precedes[taker, giver] for giver in givers)
    ]
    kept = sum(float(table.taken[taker]) for taker in others)
    shift = max(floor((room - kept) / float(table.taken[row])), 1)
    return [Lag(row, taker, shift) for taker in others if not table.precedes[taker, row]]


def _idle(table: PassTable, starts: Floats, rank: int) -> Floats:
    """Pairs (moment, idle seconds up to it), each with more idle seconds than those before.

    Up to a moment a rank has run at most the passes whose earliest starts are before it: all that allocate no bytes,
    and of the others as many as fit in memory, at best the longest per byte. The remaining seconds are idle in any
    order.
    """
    mine = list(table.of_rank[rank])
    moments = np.unique(starts[mine])
    # A start that differs from the moment only by rounding is not before it.
    grace = 1e-12 * float(moments[-1])
    begun: dict[int, Ints] = {row: np.searchsorted(starts[row], moments - grace, side="left") for row in mine}
    takers = [row for row in mine if table.taken[row] > 0]
    work = sum((table.seconds[row] * begun[row] for row in mine if row not in takers), np.zeros(len(moments)))
    left, packed = _capacity(table, rank, begun, mine), np.zeros(1)
    for row in sorted(takers, key=lambda row: -table.seconds[row] / table.taken[row]):
        # As if the last pass that fits could be cut to size.
        count = np.minimum(begun[row], np.maximum(left, 0.0) / table.taken[row])
        left, packed = left - count * table.taken[row], packed + count * table.seconds[row]
    missing = np.maximum(moments - table.share * (work + packed) - grace, 0.0)
    highest = np.maximum.accumulate(missing)
    is_new = np.concatenate(([True], highest[1:] > highest[:-1]))
    return np.stack((moments[is_new], missing[is_new]), axis=1)


def _capacity(table: PassTable, rank: int, begun: dict[int, Ints], mine: list[int]) -> Floats:
    """Bytes that passes of the rank may have allocated by each moment, including those freed again."""
    room = table.flat.room[rank]
    given = sum((-table.taken[row] * begun[row] for row in mine if table.taken[row] < 0), np.zeros(1))
    sizes = [float(table.taken[row]) for row in mine if table.taken[row]]
    if room == inf or not all(size.is_integer() for size in sizes):
        return np.asarray(room + given)
    # Whatever is held is a multiple of the common divisor of all sizes.
    step = gcd(*(int(size) for size in sizes)) or 1
    return np.asarray(room // step * step + given)


def _busy_bound(total: float, begin: Floats, end: Floats) -> float:
    """Seconds of a step in which a rank works for `total` and is idle as `begin` and, mirrored, `end` state.

    A moment and a mirrored one are both idle in full unless they overlap, which they do not if less than all of the
    work fits into them.
    """
    moments = begin[:, None, 0] + end[None, :, 0]
    lengths = total + begin[:, None, 1] + end[None, :, 1]
    return float(np.where(lengths > moments, lengths, total).max())


def _littles_law(table: PassTable, begin: Floats, end: Floats, rank: int) -> float:
    """Bytes x seconds that all microbatches hold on a rank, over its bytes; `begin` and `end` are earliest starts.

    Until enough passes can have started to fill the memory, the rest of it is lost, at both ends of the step.
    """
    room = table.flat.room[rank]
    if room == inf or room <= 0:
        return 0.0
    held = 0.0
    for stage in table.flat.stages[rank]:
        delays = table.least_delays(3 * stage) + table.seconds
        held -= sum(table.taken[3 * stage + part] * delays[3 * stage + part] for part in (1, 2))
    mine = list(table.of_rank[rank])
    lost = sum(_unfilled(starts[mine], sign * table.taken[mine], room) for starts, sign in ((begin, 1.0), (end, -1.0)))
    return (held * table.flat.num_microbatches + lost) / room


def _unfilled(starts: Floats, taken: Floats, room: float) -> float:
    """Bytes x seconds that cannot be held because too few allocating passes can have started."""
    takers = np.flatnonzero(taken > 0)
    moments = starts[takers].ravel()
    sequence = np.argsort(moments, kind="stable")
    filled = np.cumsum(np.repeat(taken[takers], starts.shape[1])[sequence])
    before = np.concatenate(([0.0], filled))[:-1]
    gaps = np.diff(moments[sequence], prepend=0.0)
    return float((np.maximum(room - before, 0.0) * gaps).sum())
