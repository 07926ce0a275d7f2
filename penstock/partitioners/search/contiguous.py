"""Finds the best cut of atoms into runs, one per stage of a placement; exact for one stage per rank."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.ir import Floats, Ints
from penstock.partitioners.atoms import Atoms
from penstock.partitioners.base import Problem
from penstock.partitioners.costs import Box, CandidateCosts, CostRates, Runs
from penstock.partitioners.score import Score
from penstock.partitioners.search.boundaries import search_boundaries, shift_equal_shares, stages_of
from penstock.partitioners.search.limits import boundary_ranges, least_load, round_up

DENSE = 1000
"""atoms up to which all pairs of places are considered"""
_BRIEF = 300
"""the same for a brief search"""
_AREA = 20_000_000
"""pairs of places that are compared for all stages together, to bound time and memory"""
_COLUMNS = 32
"""ends of runs whose costs are computed at once"""


class ContiguousCut(NamedTuple):
    """The stage of every atom, and a lower bound of the load of the busiest rank for cuts into runs.

    An infinite bound means that no cut into runs fits in memory; then the stages are those that come closest.
    """

    stage: Ints
    bound: float


def cut_runs(
    problem: Problem, atoms: Atoms, rates: CostRates, *, slack: float = 0.0, is_brief: bool = False
) -> ContiguousCut:
    """Returns runs that minimise the load of the busiest rank and, up to that load times 1 + slack, the bytes cut.

    Exact for one stage per rank, if there are at most DENSE atoms or if ranks are equal and neither messages nor limits
    matter; exact in seconds for two stages per rank in a loop or a vee without those; else the result of a search, with
    a bound. A brief search is one of the many that a partitioner makes.
    """
    runs = Runs(atoms)
    if problem.is_single and rates.is_compute_only:
        return _bisect_load(runs, rates, slack)
    is_sum = not problem.is_single and rates.is_compute_only and not len(runs.seconds.shared)
    group = coarsen(runs, len(atoms) if is_sum else max(_BRIEF if is_brief else DENSE, 4 * problem.num_stages))
    is_coarse = len(atoms) > len(np.unique(group))
    coarse = Runs(atoms.merged(group)) if is_coarse else runs
    if problem.is_single:
        found = _all_pairs(coarse, rates, slack)
    else:
        find = shift_equal_shares if is_brief else search_boundaries
        found = ContiguousCut(*find(problem.placed, coarse, rates, slack))
    fine = ContiguousCut(found.stage[group], 0.0 if is_coarse else found.bound)
    return fine if is_brief else _best_alternative(problem, atoms, rates, fine, slack)


def _best_alternative(
    problem: Problem, atoms: Atoms, rates: CostRates, found: ContiguousCut, slack: float
) -> ContiguousCut:
    """Returns the cut, or one found without messages or without coarsening if that scores better.

    The searches charge every message to the link beside a stage. Messages within a rank are free and links may differ,
    which only Score takes into account: then the load found is not a bound.
    """
    is_rough = rates.has_messages and (not problem.is_single or bool(problem.cluster.links))
    stages, bound = [found.stage], 0.0 if is_rough else found.bound
    if is_rough:
        other = cut_runs(problem, atoms, rates.without_messages, slack=slack)
        stages, bound = [found.stage, other.stage], other.bound
    elif len(atoms) > DENSE and problem.is_single and rates.is_homogeneous:
        stages.append(_bisect_load(Runs(atoms), rates, slack).stage)
    return ContiguousCut(min(Score(problem, atoms, stage) for stage in stages).stage, bound)


def coarsen(runs: Runs, number: int) -> Ints:
    """Returns a group per atom: at most `number` groups of consecutive atoms, cut where few bytes cross."""
    atoms = len(runs.atoms)
    if atoms <= number:
        return np.arange(atoms)
    prefix = runs.seconds.prefix
    by_weight = prefix / prefix[-1] if prefix[-1] > 0 else np.zeros_like(prefix)
    # Buckets are about even in seconds and in atoms; the cheapest place of every bucket stays open.
    share = (by_weight + np.arange(atoms + 1) / atoms) / 2
    bucket = np.minimum((share[1:-1] * number).astype(np.int64), number - 1)
    by_bucket = np.lexsort((runs.bytes_to_end[1:-1], bucket))
    opened = by_bucket[np.diff(bucket[by_bucket], prepend=-1) > 0]
    starts = np.zeros(atoms, dtype=np.int64)
    starts[opened[: number - 1] + 1] = 1
    return np.cumsum(starts)


def _bisect_load(runs: Runs, rates: CostRates, slack: float) -> ContiguousCut:
    """The exact cut where nothing but seconds counts: milliseconds for thousands of atoms."""
    least = least_load(runs.seconds, rates.slowness)
    limit = round_up(least * (1 + slack))
    widest = int((_AREA / len(rates.slowness)) ** 0.5)
    # The last possible places together are a cut that keeps the limit, so ranges are narrowed from below.
    ranges = [(max(low, high - widest), high) for low, high in boundary_ranges(runs.seconds, rates.slowness, limit)]
    fewest, parents = np.zeros(1), []
    for factor, (begin, end) in zip(rates.slowness, pairwise(ranges), strict=True):
        box = Box(*begin, *end)
        is_run = np.arange(begin[0], begin[1] + 1)[:, None] < np.arange(end[0], end[1] + 1)
        is_run &= factor * runs.seconds.over(box) <= limit
        total = fewest[:, None] + np.where(is_run, runs.bytes(box), np.inf)
        parents.append(total.argmin(axis=0))
        fewest = total.min(axis=0)
    chosen = [0]
    for parent in reversed(parents):
        chosen.append(int(parent[chosen[-1]]))
    boundaries = [low + offset for (low, _), offset in zip(ranges, reversed(chosen), strict=True)]
    return ContiguousCut(stages_of(boundaries), least)


def _all_pairs(runs: Runs, rates: CostRates, slack: float) -> ContiguousCut:
    """The exact cut with messages and limits, from the costs of all runs."""
    even = float(runs.seconds.prefix[-1] / (1 / rates.slowness).sum())
    # Runs that take much longer than an even share are considered only if there is no cut without them.
    for limit in (2 * even, 8 * even, np.inf):
        chains = Chains(_run_levels(runs, rates, limit), len(rates.slowness), len(runs.atoms) + 1)
        bound = least = chains.least_load(rates.loads)
        if least * (1 + slack) <= limit:
            break
    loads: Loads = rates.loads
    if np.isinf(least):
        # Nothing fits: take the stages that come closest, so that the error can name the shortage.
        loads = rates.memory_shares
        least = chains.least_load(loads)
    return ContiguousCut(stages_of(chains.fewest_bytes(loads, round_up(least * (1 + slack)))), bound)


def _run_levels(runs: Runs, rates: CostRates, limit: float) -> "Levels":
    """Levels with every place as an end, and as starts the places before it that keep the run within the limit."""
    number, fastest = len(runs.atoms), float(rates.slowness.min())

    def levels() -> "Iterator[Level]":
        for low in range(1, number + 1, _COLUMNS):
            high = min(low + _COLUMNS - 1, number)
            first = min(runs.seconds.first_start(low, round_up(limit / fastest)), low - 1)
            costs = runs.costs(Box(first, high - 1, low, high), with_sent=not rates.overlaps)
            for end in range(low, high + 1):
                some = CandidateCosts(*(part[: end - first, [end - low]] for part in costs))
                yield Level(np.arange(first, end), np.array([end]), some)

    return levels


class Level(NamedTuple):
    """Places where a stage may end, places before them where it may start, and the cost of every pair.

    A pair that is not a stage has infinite seconds.
    """

    starts: Ints
    ends: Ints
    cost: CandidateCosts


Levels = Callable[[], Iterable[Level]]
Loads = Callable[[CandidateCosts], Floats]
"""the load of each stage (first axis) with each candidate; inf if it does not fit"""


class Chains(NamedTuple):
    """Dynamic programming over chains of places: a stage is the difference of two places.

    Places are prefixes of the model that a cut may follow, ordered so that a prefix comes after those it contains: the
    first is empty, the last is the whole model. Both methods are exact: they keep the best chain for every place and
    number of stages.
    """

    levels: Levels
    num_stages: int
    num_places: int

    def least_load(self, loads: Loads) -> float:
        """Returns the load of the busiest stage of the best chain; inf if there is no chain."""
        least = np.full((self.num_stages + 1, self.num_places), np.inf)
        least[0, 0] = 0.0
        for starts, ends, cost in self.levels():
            least[1:, ends] = np.maximum(least[:-1, starts, None], loads(cost)).min(axis=1)
        return float(least[-1, -1])

    def fewest_bytes(self, loads: Loads, limit: float) -> list[int]:
        """Returns the places of the chain with the fewest bytes among those whose stages keep the limit."""
        fewest = np.full((self.num_stages + 1, self.num_places), np.inf)
        fewest[0, 0] = 0.0
        parent = np.zeros((self.num_stages + 1, self.num_places), dtype=np.int64)
        for starts, ends, cost in self.levels():
            total = fewest[:-1, starts, None] + np.where(loads(cost) <= limit, cost.bytes, np.inf)
            best: Ints = total.argmin(axis=1)
            fewest[1:, ends] = np.take_along_axis(total, best[:, None], axis=1)[:, 0]
            parent[1:, ends] = starts[best]
        chain = [self.num_places - 1]
        for stage in range(self.num_stages, 0, -1):
            chain.append(int(parent[stage, chain[-1]]))
        return chain[::-1]
