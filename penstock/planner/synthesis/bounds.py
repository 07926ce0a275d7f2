"""Computes a lower bound of the length of a step, with the reason.

The bound is the largest of three kinds, each computed per rank:

- *path*: the longest chain of passes through a pass of the rank, from its earliest start to the end of the step.
- *work*: the seconds of all passes of the rank, and the seconds for which it must be idle. A rank is idle until its
  first values arrive and, once its memory is full, until the first gradients return. In mirrored time (see
  pass_table.py) the same argument gives the idle seconds at the end of the step.
- *memory* (Little's law): the bytes x seconds that all microbatches hold, divided by the bytes of the rank.

If the objective is the span, each rank is bounded alone: the passes of other ranks become delays between its own.

In this file a row allocates if its passes increase the bytes held (`allocated` above 0), and frees if they decrease
them. Part 0, 1, 2 of a stage are its rows of forwards, input gradients and weight gradients.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import floor, gcd, inf
from typing import NamedTuple

import numpy as np

from penstock.ir import Floats, Ints
from penstock.planner.synthesis.pass_table import PassNeed, PassTable
from penstock.planner.synthesis.problem import ScheduleProblem

_CAUTION = 1e-9
"""the share of a bound that may be due to rounding"""
_MAX_MACHINE_PASSES = 20_000
"""only the first passes of a step use the single-machine bound, which costs the most; later ones use dependencies"""
_MACHINE_DEPTH = 48
"""the single-machine bound looks at this many passes per row, the latest ones"""


class Bound(NamedTuple):
    """A lower bound of the seconds of a step, with the reason in words."""

    seconds: float
    why: str


def lower_bound(problem: ScheduleProblem) -> Bound:
    """Returns a proven lower bound of a problem in its objective."""
    table, ranks = PassTable.least(problem), range(problem.cluster.ranks)
    if problem.objective == "makespan":
        bounds = _bounds(table, ranks)
        cores = problem.cluster.cores
        if cores is not None and cores < len(ranks):
            work = table.share * table.work(range(table.num_rows))
            bounds.append(Bound(work / cores, f"work of all ranks on {cores} cores"))
    else:
        bounds = [bound for rank in ranks for bound in _bounds(_single_rank(table, rank), (rank,))]
    best = max(bounds)
    return Bound((best.seconds + problem.step_seconds) * (1 - _CAUTION), best.why)


def _bounds(table: PassTable, ranks: Iterable[int]) -> list[Bound]:
    """The three bounds of every rank."""
    mirrored = table.mirrored()
    # A start in mirrored time is the time from the end of a pass to the end of the step; microbatches run backwards.
    begin, end = earliest_starts(table), earliest_starts(mirrored)
    bounds = [_longest_microbatch(table)] if table.unequal is not None else []
    for rank in ranks:
        rows = list(table.rows_of_rank[rank])
        path = (begin[rows] + table.seconds[rows, None] + end[rows][:, ::-1]).max()
        work = table.share * table.work(rows)
        # The idle seconds up to a moment at the beginning and from a moment at the end on add up only if the two do not
        # overlap. They do not if work and idle seconds together are longer than the two moments together.
        early, late = _forced_idle(table, begin, rank), _forced_idle(mirrored, end, rank)
        lengths = work + early[:, None, 1] + late[None, :, 1]
        busy = np.where(lengths > early[:, None, 0] + late[None, :, 0], lengths, work).max()
        bounds.append(Bound(float(path), f"path through rank {rank}"))
        bounds.append(Bound(float(busy), f"work and forced idle time of rank {rank}"))
        bounds.append(Bound(_littles_law(table, begin, end, rank), f"memory of rank {rank}"))
    return bounds


def _longest_microbatch(table: PassTable) -> Bound:
    """The longest chain of passes of one microbatch, if microbatches differ."""
    starts = np.zeros_like(table.by_microbatch)
    for row in table.sequence:
        for need in table.needed_by[row]:
            ready = starts[need.needed] + table.by_microbatch[need.needed] + need.lag
            starts[row] = np.maximum(starts[row], ready)
    ends = (starts + table.by_microbatch).max(axis=0)
    return Bound(float(ends.max()), f"path of microbatch {int(ends.argmax())}")


def _single_rank(table: PassTable, rank: int) -> PassTable:
    """The table with needs between rows of one rank only; the passes of other ranks between them become delays."""
    rows = table.rows_of_rank[rank]
    needs = []
    for row in rows:
        delays = table.least_delays(row)
        needs += [
            PassNeed(other, row, latency=float(delays[other] - table.seconds[row]))
            for other in rows
            if other != row and delays[other] > -inf
        ]
    return replace(table, needs=tuple(needs))


class _Predecessors(NamedTuple):
    """The passes that must come before pass k of a row."""

    needs: list[tuple[int, float]]
    """(row, seconds from start to start): pass k of that row"""
    lags: list[tuple[int, int]]
    """(row, shift): pass k - shift of that row has ended, because of memory"""
    on_rank: list[tuple[int, int]]
    """(row, shift): passes up to k - shift of that row run before it on the same rank, for whatever reason"""


def earliest_starts(table: PassTable) -> Floats:
    """Returns by row and microbatch a moment before which no order can start the pass.

    The moments never decrease along a row. A pass starts after the passes that it needs, the previous pass of its row
    and those that must free memory for it, and after its rank has had time for all passes that must precede it there.
    The last condition is the bound of single-machine scheduling with release times.
    """
    predecessors = _find_predecessors(table)
    num_machine_columns = _MAX_MACHINE_PASSES // max(table.num_rows, 1)
    seconds = table.seconds.tolist()
    amounts = np.repeat(table.share * table.seconds[:, None], _MACHINE_DEPTH, axis=1)
    first = table.before[table.rank].tolist()
    result = np.zeros((table.num_rows, table.problem.num_microbatches))
    # The same numbers twice: scalars are read from lists, which is faster, and slices from the array.
    starts: list[list[float]] = [[] for _ in seconds]
    for column in range(table.problem.num_microbatches):
        for row in table.sequence:
            needs, lags, on_rank = predecessors[row]
            earliest = starts[row][-1] + seconds[row] if column else first[row]
            for needed, gap in needs:
                earliest = max(earliest, starts[needed][column] + gap)
            for needed, shift in lags:
                if column >= shift:
                    earliest = max(earliest, starts[needed][column - shift] + seconds[needed])
            # With its own row alone this would repeat the first condition.
            if column < num_machine_columns and len(on_rank) > 1:
                earliest = max(earliest, _machine_end(result, amounts, on_rank, column))
            starts[row].append(earliest)
            result[row, column] = earliest
    return result


def _find_predecessors(table: PassTable) -> list[_Predecessors]:
    """The predecessors of every row."""
    memory = memory_lags(table)
    result = []
    for row in range(table.num_rows):
        rows = table.rows_of_rank[int(table.rank[row])]
        shifts = {other: 0 for other in rows if other != row and table.precedes[other, row]} | {row: 1}
        for lag in memory:
            # A lag of a row before this one, with everything that comes before the row that it waits for.
            if table.precedes[lag.row, row] and lag.needed in rows:
                for other in rows:
                    if table.precedes[other, lag.needed]:
                        shifts[other] = min(shifts.get(other, lag.shift), lag.shift)
        result.append(
            _Predecessors(
                [(need.needed, float(table.seconds[need.needed]) + need.lag) for need in table.needed_by[row]],
                [(lag.needed, lag.shift) for lag in memory if lag.row == row],
                list(shifts.items()),
            )
        )
    return result


def _machine_end(starts: Floats, amounts: Floats, predecessors: list[tuple[int, int]], column: int) -> float:
    """The earliest moment at which a rank can have run all (row, shift) predecessors of a pass of this column.

    Passes with an earliest start of t or later run one after another from t on: for every t, they end no sooner than t
    plus the sum of their seconds.
    """
    released, work = [], []
    for row, shift in predecessors:
        last = column + 1 - shift
        if last > 0:
            released.append(starts[row, max(last - _MACHINE_DEPTH, 0) : last])
            work.append(amounts[row, :last])
    if not released:
        return 0.0
    # Methods of arrays, not functions of numpy, which take twice as long for so few numbers.
    moments = np.concatenate(released)
    latest_first = (-moments).argsort(kind="stable")
    return float((moments[latest_first] + np.concatenate(work)[latest_first].cumsum()).max())


class Lag(NamedTuple):
    """A dependency between microbatches: pass k of `row` starts after pass k - shift of `needed` has ended."""

    row: int
    needed: int
    shift: int


def memory_lags(table: PassTable) -> tuple[Lag, ...]:
    """Returns the dependencies between passes of a rank that its memory limit implies.

    - *Room.* When pass k of a row starts, the rank has allocated the bytes of microbatches 0 to k for all rows that
      precede it. Bytes above the room must have been freed by earlier microbatches, so their freeing passes, and the
      passes that those need, come first.
    - *Deadlock.* The bytes of a microbatch are freed only after all its allocating passes on the rank have run. If one
      allocating row runs too far ahead of another, the other never finds room, and nothing is ever freed.
    """
    room = table.problem.room
    return tuple(
        lag
        for rank, rows in enumerate(table.rows_of_rank)
        if room[rank] < inf
        for row in rows
        for lag in (*_room_lags(table, row, room[rank]), *_deadlock_lags(table, row, room[rank]))
    )


def _room_lags(table: PassTable, row: int, room: float) -> list[Lag]:
    """The lags of a row because earlier microbatches must have freed room for it (*Room* in `memory_lags`)."""
    rows = table.rows_of_rank[int(table.rank[row])]
    # By stage, the bytes that one microbatch has allocated when its pass of this row starts.
    held: dict[int, float] = {}
    for other in rows:
        if table.allocated[other] > 0 and table.precedes[other, row]:
            held[other // 3] = held.get(other // 3, 0.0) + float(table.allocated[other])
    freed_by = {r: size for stage, total in held.items() for r, size in _freed_after(table, row, stage, total).items()}
    total = sum(held[stage] for stage in {freeing // 3 for freeing in freed_by})
    lags = []
    for needed in rows:
        if needed == row or not table.precedes[row, needed]:
            continue
        # Each microbatch whose pass of `needed` has not run still holds these bytes.
        freed = sum(freed_by[freeing] for freeing in freed_by if table.precedes[needed, freeing])
        if freed > 0:
            lags.append(Lag(row, needed, max(floor((room - total) / freed) + 1, 1)))
    return lags


def _freed_after(table: PassTable, row: int, stage: int, total: float) -> dict[int, float]:
    """By row, the bytes freed after `row` of the `total` that a stage allocated up to it.

    Empty if some of the bytes may be freed before the pass of `row`, as they then say nothing about its room.
    """
    freeing = {3 * stage + part: -float(table.allocated[3 * stage + part]) for part in range(3)}
    freeing = {other: size for other, size in freeing.items() if size > 0}
    if not all(table.precedes[row, other] for other in freeing):
        return {}
    # A stage that allocates in two steps may have done only one of them by now.
    excess = sum(freeing.values()) - total
    return {other: max(size - excess, 0.0) for other, size in freeing.items()}


def _deadlock_lags(table: PassTable, row: int, room: float) -> list[Lag]:
    """The lags of a row that would leave no room for another if it ran further ahead (*Deadlock*)."""
    if table.allocated[row] <= 0:
        return []
    rows = table.rows_of_rank[int(table.rank[row])]
    freeing = table.freeing_rows(row // 3)
    # The other allocating rows that must run before the bytes of this one are freed.
    others = [
        other
        for other in rows
        if other != row and table.allocated[other] > 0 and all(table.precedes[other, free] for free in freeing)
    ]
    reserved = sum(float(table.allocated[other]) for other in others)
    shift = max(floor((room - reserved) / float(table.allocated[row])), 1)
    return [Lag(row, other, shift) for other in others if not table.precedes[other, row]]


def _forced_idle(table: PassTable, starts: Floats, rank: int) -> Floats:
    """Rows of (moment, seconds up to it for which the rank is idle in any order); both increase from row to row.

    Up to a moment a rank has run at most the passes whose earliest starts are before it: all that allocate nothing,
    and of the others as many as fit in memory. Which ones fit is a knapsack, bounded by its relaxation: the longest per
    byte first, the last one cut to size.
    """
    rows = list(table.rows_of_rank[rank])
    moments = np.unique(starts[rows])
    # A start that differs from the moment only by rounding is not before it.
    grace = 1e-12 * float(moments[-1])
    begun: dict[int, Ints] = {row: np.searchsorted(starts[row], moments - grace, side="left") for row in rows}
    allocating = [row for row in rows if table.allocated[row] > 0]
    # If microbatches differ, a row has begun its longest passes at most.
    longest = table.by_microbatch.max(axis=1)
    done = {row: longest[row] * begun[row] for row in rows}
    if table.unequal is not None:
        for row in rows:
            done[row] = np.concatenate(([0.0], np.cumsum(-np.sort(-table.unequal[row]))))[begun[row]]
    work = sum((done[row] for row in rows if row not in allocating), np.zeros(len(moments)))
    left, packed = _capacity(table, rank, begun, rows), np.zeros(1)
    for row in sorted(allocating, key=lambda row: -longest[row] / table.allocated[row]):
        count = np.minimum(begun[row], np.maximum(left, 0.0) / table.allocated[row])
        left, packed = left - count * table.allocated[row], packed + count * longest[row]
    packed = np.minimum(packed, sum((done[row] for row in allocating), np.zeros(len(moments))))
    idle = np.maximum(moments - table.share * (work + packed) - grace, 0.0)
    # Only moments that add idle seconds can give a larger bound.
    highest = np.maximum.accumulate(idle)
    is_new = np.concatenate(([True], highest[1:] > highest[:-1]))
    return np.stack((moments[is_new], idle[is_new]), axis=1)


def _capacity(table: PassTable, rank: int, begun: dict[int, Ints], rows: list[int]) -> Floats:
    """Bytes that passes of the rank may have allocated by each moment, including those freed again."""
    room = table.problem.room[rank]
    freed = sum((-table.allocated[row] * begun[row] for row in rows if table.allocated[row] < 0), np.zeros(1))
    sizes = [float(table.allocated[row]) for row in rows if table.allocated[row]]
    if room == inf or not all(size.is_integer() for size in sizes):
        return np.asarray(room + freed)
    # The bytes held are always a multiple of the common divisor of all sizes, so the rest of the room is of no use.
    step = gcd(*(int(size) for size in sizes)) or 1
    return np.asarray(room // step * step + freed)


def _littles_law(table: PassTable, begin: Floats, end: Floats, rank: int) -> float:
    """Bytes x seconds that all microbatches hold on a rank, divided by its bytes.

    `begin` and `end` are earliest starts, in forward and in mirrored time. Until enough passes can have started to fill
    the memory, the rest of it is unused, at both ends of the step.
    """
    room = table.problem.room[rank]
    if room == inf or room <= 0:
        return 0.0
    held = 0.0
    for stage in table.problem.placement.stages[rank]:
        # Bytes are held at least from the start of the forward to the end of the pass that frees them.
        delays = table.least_delays(3 * stage) + table.seconds
        held -= sum(table.allocated[3 * stage + part] * delays[3 * stage + part] for part in (1, 2))
    rows = list(table.rows_of_rank[rank])
    ends = [_unused(starts[rows], sign * table.allocated[rows], room) for starts, sign in ((begin, 1.0), (end, -1.0))]
    least = held * table.problem.num_microbatches / room
    both = least + sum(area for area, _ in ends) / room
    # As with idle seconds in `_bounds`: unused memory at both ends adds up only if the two ends do not overlap.
    return both if both > sum(seconds for _, seconds in ends) else least + max(area for area, _ in ends) / room


def _unused(starts: Floats, allocated: Floats, room: float) -> tuple[float, float]:
    """Bytes x seconds that cannot be held because too few allocating passes can have started, and until when."""
    allocating = np.flatnonzero(allocated > 0)
    moments = starts[allocating].ravel()
    sequence = np.argsort(moments, kind="stable")
    moments = moments[sequence]
    filled = np.cumsum(np.repeat(allocated[allocating], starts.shape[1])[sequence])
    filled_before = np.concatenate(([0.0], filled))[:-1]
    gaps = np.diff(moments, prepend=0.0)
    is_unused = filled_before < room
    until = float(moments[is_unused][-1]) if is_unused.any() else 0.0
    return float((np.maximum(room - filled_before, 0.0) * gaps).sum()), until
