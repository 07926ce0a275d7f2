"""Cuts into runs for placements with several stages per rank, so that the sums per rank are even.

A run is the consecutive atoms of one stage. Boundaries are the places where runs begin and end, from 0 to the number of
atoms: run s is from `boundaries[s]` to `boundaries[s + 1]`. The *charges* of a run are what it costs its rank: seconds
of work, seconds of messages if they take time, and bytes if memory is limited. The *totals* of a rank are the sums over
its runs.

Boundaries are shifted, one or several at a time, while that relieves the busiest rank: moving all boundaries from one
to another by about the same weight takes from one stage and gives to a stage far away, while the stages in between
stay as heavy as they are. A branch and bound search completes this for few atoms, and an exact test of limits
(`limit_test`) for two stages per rank.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.ir import Floats, Ints, Placement
from penstock.partitioners.costs import Box, CandidateCosts, CostRates, Runs
from penstock.partitioners.search.limits import boundary_ranges, least_load, limit_test, round_up

_FEW_ATOMS = 64
"""atoms up to which branch and bound is tried"""
_STEPS = 2000
"""of branch and bound"""
_TRIALS = 60
"""limits that the exact test is asked about"""
_RESTARTS = 5
"""random boundaries to start from"""
_MANY_STAGES = 32
"""stages above which there are no random restarts"""
_BALANCED = 0.001
"""how far, as a share, the busiest rank may be above the mean to need no further search"""


def stages_of(boundaries: list[int] | Ints) -> Ints:
    """Returns the stage of every atom from the boundaries of the stages, first and last included."""
    return np.repeat(np.arange(len(boundaries) - 1), np.diff(boundaries))


class BoundaryKey(NamedTuple):
    """Bytes over the limits, load of the busiest rank, sum of squared loads: the smaller the better, in this order."""

    excess: float
    busiest: float
    unevenness: float


@dataclass(frozen=True)
class RunTable:
    """The costs of all runs of a moderate number of atoms, on the stages of a placement."""

    runs: Runs
    rates: CostRates
    ranks: Ints
    """per stage"""

    @cached_property
    def costs(self) -> CandidateCosts:
        """Row: start of a run; column: its end."""
        number = len(self.runs.atoms)
        return self.runs.costs(Box(0, number, 0, number), with_sent=not self.rates.overlaps)

    @cached_property
    def on_rank(self) -> Floats:
        """1 where a stage (row) is on a rank (column)."""
        return np.eye(int(self.ranks.max()) + 1)[self.ranks]

    @cached_property
    def limit(self) -> Floats:
        """Bytes of memory per rank."""
        limit = np.full(self.on_rank.shape[1], np.inf)
        limit[self.ranks] = self.rates.limit
        return limit

    @cached_property
    def is_additive(self) -> bool:
        """Whether a run costs the sum of its atoms, so that the table of all runs is not needed."""
        return not (self.rates.has_messages or self.rates.has_limits or len(self.runs.seconds.shared))

    @cached_property
    def chains(self) -> tuple[Ints, Ints]:
        """The first and the last stage of all choices of consecutive boundaries."""
        low, high = np.triu_indices(len(self.ranks) - 1)
        return low, high + 1

    def charges(self, starts: Ints, ends: Ints, stages: Ints) -> Floats:
        """Returns rows of charges of every run on its stage: seconds of work, of messages if they count, then bytes."""
        rates = self.rates
        if self.is_additive:
            prefix = self.runs.seconds.prefix
            return (rates.slowness[stages] * (prefix[ends] - prefix[starts]))[None]
        costs = self.costs
        rows = [rates.slowness[stages] * costs.seconds[starts, ends]]
        if self.rates.has_messages:
            sizes = (costs.received, costs.grads_sent, costs.sent, costs.grads_received)[: 2 if rates.overlaps else 4]
            for way, size in enumerate(sizes):
                rows.append(rates.message_seconds(rates.links[stages, way], size[starts, ends]))
            rows = rows if rates.overlaps else [np.sum(rows, axis=0)]
        if self.rates.has_limits:
            rows.append(costs.state[starts, ends] + rates.in_flight[stages] * costs.kept[starts, ends])
        return np.stack(rows)

    def totals(self, boundaries: Ints) -> Floats:
        """Returns the charges of every rank."""
        return self.charges(boundaries[:-1], boundaries[1:], np.arange(len(self.ranks))) @ self.on_rank

    def loads(self, totals: Floats) -> Floats:
        """Returns the load of every rank; ranks are along the last axis, charges along the one before."""
        load: Floats = totals[..., : -1 if self.rates.has_limits else None, :].max(axis=-2)
        return load

    def excess(self, totals: Floats) -> Floats:
        """Returns the bytes by which every rank exceeds its limit."""
        if not self.rates.has_limits:
            return np.zeros((*totals.shape[:-2], totals.shape[-1]))
        return np.maximum(totals[..., -1, :] - self.limit, 0)

    def keys(self, totals: Floats) -> tuple[Floats, Floats, Floats]:
        """Returns the parts of the keys of many totals."""
        loads = self.loads(totals)
        return self.excess(totals).sum(axis=-1), loads.max(axis=-1), (loads**2).sum(axis=-1)

    def key(self, boundaries: Ints) -> BoundaryKey:
        """Returns how good boundaries are."""
        return BoundaryKey(*(float(part) for part in self.keys(self.totals(boundaries))))


def search_boundaries(placement: Placement, runs: Runs, rates: CostRates, slack: float) -> tuple[Ints, float]:
    """Returns the stage of every atom, and a lower bound of the load for cuts into runs; inf if no cut fits."""
    table = RunTable(runs, rates, np.array(placement.ranks))
    boundaries, bound = _search(placement, table)
    key = table.key(boundaries)
    boundaries = save_bytes(table, boundaries, key.busiest * (1 + slack))
    return stages_of(boundaries), np.inf if key.excess > 0 else bound


def shift_equal_shares(placement: Placement, runs: Runs, rates: CostRates, slack: float) -> tuple[Ints, float]:
    """Returns the stages that shifts of equal shares lead to, without a bound: a brief search."""
    boundaries = shift_boundaries(placement, runs, rates, _equal_shares(runs, len(placement)), slack)
    return stages_of(boundaries), 0.0


def shift_boundaries(placement: Placement, runs: Runs, rates: CostRates, boundaries: Ints, slack: float = 0.0) -> Ints:
    """Returns given boundaries, shifted until no rank can be relieved, and then to where few bytes cross."""
    table = RunTable(runs, rates, np.array(placement.ranks))
    boundaries = balance(table, boundaries)
    return save_bytes(table, boundaries, table.key(boundaries).busiest * (1 + slack))


def _search(placement: Placement, table: RunTable) -> tuple[Ints, float]:
    """The boundaries and a lower bound of the load, 0 if none is proven."""
    runs, number = table.runs, len(table.ranks)
    boundaries = balance(table, _equal_shares(runs, number))
    if len(runs.atoms) <= _FEW_ATOMS:
        key = table.key(boundaries)
        search = _BranchAndBound(table, math.inf if key.excess > 0 else key.busiest, _STEPS)
        search.extend([0], 0 * table.totals(np.arange(number + 1)))
        boundaries = np.array(search.boundaries) if search.boundaries else boundaries
        # If the search has ended within its budget, all boundaries were tried: no load is smaller.
        if search.budget > 0 and (bound := table.key(boundaries).busiest) > 0:
            return boundaries, bound
    # Further boundaries to start from: the most equal stages as early and as late as possible, and random shares.
    most = round_up(least_load(runs.seconds, np.ones(number)))
    early, late = np.array(boundary_ranges(runs.seconds, np.ones(number), most)).T
    restarts = _RESTARTS if number <= _MANY_STAGES else 0
    moves = np.random.default_rng(0).uniform(-0.5, 0.5, (restarts, number + 1))
    random_shares = [_equal_shares(runs, number, move) for move in moves]
    for start in (*_without_idle_atoms(placement, table), early, late, *random_shares):
        loads = table.loads(table.totals(boundaries))
        if table.key(boundaries).excess == 0 and loads.max() <= loads.mean() * (1 + _BALANCED):
            break
        boundaries = min(boundaries, balance(table, start), key=table.key)
    if table.rates.has_messages or table.rates.has_limits:
        return boundaries, 0.0
    return _bisect_limits(placement, table, boundaries)


def _equal_shares(runs: Runs, number: int, moves: Floats | float = 0.0) -> Ints:
    """Boundaries of equal shares, moved by the given numbers of shares."""
    prefix = runs.seconds.prefix
    wanted = prefix[-1] * (np.arange(number + 1) + moves) / number
    return _without_empty_runs(np.searchsorted(prefix, wanted), len(runs.atoms))


def _without_empty_runs(boundaries: Ints, number: int) -> Ints:
    """The boundaries, moved as little as necessary for every run to have an atom."""
    steps = np.arange(len(boundaries))
    rising = np.maximum.accumulate(boundaries - steps) + steps
    rising = np.minimum(rising, number - steps[::-1])
    return np.concatenate(([0], np.maximum(rising[1:-1], steps[1:-1]), [number]))


def _without_idle_atoms(placement: Placement, table: RunTable) -> list[Ints]:
    """The boundaries that a search finds if atoms without seconds are joined; none if there are no such atoms.

    Of places with no seconds between them only the cheapest stays: between cuts that are equally balanced, a search
    that balances loads finds no direction.
    """
    runs, number = table.runs, len(table.runs.atoms)
    prefix = runs.seconds.prefix
    by_weight = np.lexsort((runs.bytes_to_end, prefix))
    places = np.sort(by_weight[np.diff(prefix[by_weight], prepend=-1) > 0])
    places = np.unique((0, *places[(places > 0) & (places < number)], number))
    if not len(placement) < len(places) < number + 1:
        return []
    group = np.repeat(np.arange(len(places) - 1), np.diff(places))
    coarse = RunTable(Runs(runs.atoms.merged(group)), table.rates, table.ranks)
    return [places[_search(placement, coarse)[0]]]


def balance(table: RunTable, boundaries: Ints) -> Ints:
    """Returns the boundaries after the best shift, repeated until no shift helps."""
    key = table.key(boundaries)
    while True:
        shifted = [found for moved in _moves(table, boundaries) if (found := _best_shift(table, boundaries, moved))]
        if not shifted:
            return boundaries
        best, better = min(shifted, key=lambda found: found[0])
        # By the first part of the key that differs by more than rounding.
        changed = [(now, old) for now, old in zip(best, key, strict=True) if abs(now - old) > 1e-12 * abs(old)]
        if not changed or changed[0][0] > changed[0][1]:
            return boundaries
        key, boundaries = best, better


def _moves(table: RunTable, boundaries: Ints) -> list[Ints]:
    """All boundaries moved one way: by one atom, or by seconds from the surplus of the busiest rank down."""
    number = len(table.runs.atoms)
    prefix = table.runs.seconds.prefix
    loads = table.loads(table.totals(boundaries))
    surplus = float(loads.max() - loads.mean()) / float(table.rates.slowness.max())
    moves = [boundaries + 1, boundaries - 1]
    for amount in surplus * 0.5 ** np.arange(6):
        moves.append(np.searchsorted(prefix, prefix[boundaries] + amount))
        moves.append(np.searchsorted(prefix, prefix[boundaries] - amount, side="right") - 1)
    for moved in moves:
        moved[0], moved[-1] = 0, number
    return list(np.unique(np.clip(moves, 0, number), axis=0))


def _best_shift(table: RunTable, boundaries: Ints, moved: Ints) -> tuple[BoundaryKey, Ints] | None:
    """The best choice of consecutive boundaries to move, among those that change the busiest rank."""
    stages = np.arange(len(table.ranks))
    start, end, new_start, new_end = boundaries[:-1], boundaries[1:], moved[:-1], moved[1:]
    now = table.charges(start, end, stages)
    total = now @ table.on_rank
    low, high = table.chains
    num_empty = np.concatenate(([0], np.cumsum(new_start >= new_end)))
    excess = table.excess(total)
    relieved = int(excess.argmax() if excess.any() else table.loads(total).argmax())
    chosen = (start < new_end)[low] & (new_start < end)[high] & (num_empty[high] == num_empty[low + 1])
    chosen &= (table.ranks[low] == relieved) | (table.ranks[high] == relieved)
    if not chosen.any():
        return None
    low, high = low[chosen], high[chosen]
    # Stage `low` gets another end, stage `high` another start, those between get both.
    first, last, between = (
        (table.charges(begin, stop, stages) - now)[:, :, None] * table.on_rank
        for begin, stop in ((start, new_end), (new_start, end), (new_start, new_end))
    )
    summed = np.concatenate((np.zeros_like(between[:, :1]), between.cumsum(axis=1)), axis=1)
    totals = total[:, None] + first[:, low] + last[:, high] + summed[:, high] - summed[:, low + 1]
    excesses, busiest, unevenness = table.keys(np.moveaxis(totals, 0, 1))
    best = int(np.lexsort((unevenness, busiest, excesses))[0])
    result = boundaries.copy()
    result[low[best] + 1 : high[best] + 1] = moved[low[best] + 1 : high[best] + 1]
    return BoundaryKey(float(excesses[best]), float(busiest[best]), float(unevenness[best])), result


def save_bytes(table: RunTable, boundaries: Ints, limit: float) -> Ints:
    """Returns the boundaries moved, one at a time, to where fewer bytes cross, with every rank within the limit."""
    for _ in range(8):
        before = boundaries
        for at in range(1, len(boundaries) - 1):
            boundaries = _cheapest_place(table, boundaries, at, max(limit, table.key(boundaries).busiest))
        if (before == boundaries).all():
            break
    return boundaries


def _cheapest_place(table: RunTable, boundaries: Ints, at: int, limit: float) -> Ints:
    """The boundaries with one of them moved to where the fewest bytes cross and no rank has a load above the limit."""
    left, right = int(boundaries[at - 1]), int(boundaries[at + 1])
    places = np.arange(left + 1, right)
    rest = table.totals(boundaries) - sum(
        np.outer(table.charges(boundaries[[s]], boundaries[[s + 1]], np.array([s]))[:, 0], table.on_rank[s])
        for s in (at - 1, at)
    )
    ahead = table.charges(np.full_like(places, left), places, np.full_like(places, at - 1))
    behind = table.charges(places, np.full_like(places, right), np.full_like(places, at))
    totals = rest[:, None] + ahead[:, :, None] * table.on_rank[at - 1] + behind[:, :, None] * table.on_rank[at]
    excess, busiest, _ = table.keys(np.moveaxis(totals, 0, 1))
    allowed = (busiest <= limit * (1 + 1e-12)) & (excess <= table.key(boundaries).excess)
    cost = table.runs.bytes(Box(left, left, left + 1, right - 1))[0]
    cost = cost + table.runs.bytes(Box(left + 1, right - 1, right, right))[:, 0]
    crossing = np.where(allowed, cost, np.inf)
    best = int(crossing.argmin())
    if crossing[best] >= cost[boundaries[at] - left - 1]:
        return boundaries
    return np.concatenate((boundaries[:at], [places[best]], boundaries[at + 1 :]))


class _BranchAndBound:
    """Tries boundaries stage by stage and gives up where no cut better than `best` can follow."""

    def __init__(self, table: RunTable, best: float, budget: int) -> None:
        self.table = table
        self.best = best * (1 - 1e-9)
        self.budget = budget
        """remaining steps; above 0 in the end if everything was tried"""
        self.boundaries: list[int] = []
        """the best boundaries found; empty: none better than given"""
        self.seen: set[tuple[int, int, bytes]] = set()

    def extend(self, boundaries: list[int], totals: Floats) -> None:
        """Tries all boundaries that begin with the given ones, whose charges per rank are `totals`."""
        table, stage, start = self.table, len(boundaries) - 1, boundaries[-1]
        last = len(table.runs.atoms) - (len(table.ranks) - 1 - stage)
        state = (stage, start, np.round(totals, 9).tobytes())
        # The ranks of the remaining stages must have room for the remaining work, even if it were divisible at will.
        prefix = table.runs.seconds.prefix
        ranks, first = np.unique(table.ranks[stage:], return_index=True)
        room = (self.best - totals[0, ranks]) / table.rates.slowness[stage:][first]
        may_fit = bool(prefix[-1] - prefix[start] <= room.sum() * (1 + 1e-9))
        if self.budget <= 0 or state in self.seen or not may_fit:
            return
        self.seen.add(state)
        ends = np.arange(start + 1, last + 1) if stage < len(table.ranks) - 1 else np.array([last])
        charges = table.charges(np.full_like(ends, start), ends, np.full_like(ends, stage))
        rank = table.ranks[stage]
        with_run = totals[:, rank, None] + charges
        fits = table.loads(with_run) < self.best
        if table.rates.has_limits:
            fits &= with_run[-1] <= table.limit[rank]
        self.budget -= 1 + int(fits.sum())
        for at in np.flatnonzero(fits)[::-1].tolist():
            after = totals.copy()
            after[:, rank] = with_run[:, at]
            if (table.loads(after) >= self.best).any():
                continue
            if len(boundaries) == len(table.ranks):
                self.best, self.boundaries = float(table.loads(after).max()) * (1 - 1e-9), [*boundaries, int(ends[at])]
            else:
                self.extend([*boundaries, int(ends[at])], after)


def _bisect_limits(placement: Placement, table: RunTable, boundaries: Ints) -> tuple[Ints, float]:
    """Better boundaries as long as there may be some, and the largest load that no cut can keep."""
    prefix, number = table.runs.seconds.prefix, len(table.runs.atoms)
    slowness = table.rates.slowness[: placement.num_ranks]
    low = float(prefix[-1] / (1 / slowness).sum())
    within = limit_test(placement, prefix, slowness)
    if within is None:
        return boundaries, low
    # No cut has a load below `low`; the best boundaries have `high`. `granted` is the least limit that the test grants:
    # it may be below `high`, because the runs of the test may be empty, and items that they share cost nothing.
    high = granted = table.key(boundaries).busiest
    for _ in range(_TRIALS):
        if granted <= low * (1 + 1e-9):
            break
        # Close to the best, test whether anything at all is better.
        is_last = granted - low < 1e-3 * granted
        limit = granted * (1 - 1e-9) if is_last else (low + granted) / 2
        places = within(limit)
        if places is None:
            low = granted if is_last else limit
            continue
        better = balance(table, _without_empty_runs(np.array(places), number))
        if (reached := table.key(better).busiest) < high:
            boundaries, high, granted = better, reached, reached
        elif is_last:
            break
        else:
            granted = limit
    return boundaries, low
