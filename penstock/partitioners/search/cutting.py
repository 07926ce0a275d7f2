"""cutting: the best way to cut atoms into runs, one for every stage of a placement."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Floats, Ints
from penstock.partitioners.atoms.windows import Box
from penstock.partitioners.base import Problem
from penstock.partitioners.search.bill import Bill, Rates
from penstock.partitioners.search.judge import Judged
from penstock.partitioners.search.minimax import Chains, Level, Levels, Loads, nudged
from penstock.partitioners.search.pairing import once, paired
from penstock.partitioners.search.probing import reaches, shortest
from penstock.partitioners.search.runs import Runs
from penstock.partitioners.search.thinning import thinned

DENSE = 1000
"""atoms up to which all pairs of places are looked at"""
BRIEF = 300
"""the same for a brief search"""
_AREA = 20_000_000
_COLUMNS = 32


class Cut(NamedTuple):
    """The stage of every atom, and a load of the busiest rank that no cut into runs can stay below.

    An infinite bound says that no cut into runs fits in memory; then these are the stages that come nearest.
    """

    stage: Ints
    bound: float


def cut(problem: Problem, atoms: Atoms, rates: Rates, *, slack: float = 0.0, is_brief: bool = False) -> Cut:
    """Runs that make the busiest rank least busy and, up to that times 1 + slack, cost few bytes.

    Exact for one stage per rank, if there are at most DENSE atoms or if ranks are alike and neither messages nor limits
    matter; exact in seconds for two stages per rank in a loop or a vee without those; else the result of a search, with
    a bound. A brief search is one of the many that a partitioner makes.
    """
    runs = Runs(atoms)
    if problem.is_single and rates.are_plain:
        return _by_probing(runs, rates, slack)
    is_sum = not problem.is_single and rates.are_plain and not len(runs.weighing.shared)
    group = thinned(runs, len(atoms) if is_sum else max(BRIEF if is_brief else DENSE, 4 * problem.num_stages))
    is_thinned = len(atoms) > len(np.unique(group))
    coarse = Runs(atoms.merged(group)) if is_thinned else runs
    if problem.is_single:
        found = _by_pairs(coarse, rates, slack)
    else:
        found = Cut(*(once if is_brief else paired)(problem.placed, coarse, rates, slack))
    fine = Cut(found.stage[group], 0.0 if is_thinned else found.bound)
    return fine if is_brief else _checked(problem, atoms, rates, fine, slack)


def _checked(problem: Problem, atoms: Atoms, rates: Rates, found: Cut, slack: float) -> Cut:
    """The cut, or one that leaves messages or some limits out of account, if that happens to be better.

    Messages within a rank are free and links may differ, which only the judge knows: then what was found is no bound.
    """
    is_rough = rates.has_messages and (not problem.is_single or bool(problem.cluster.links))
    stages, bound = [found.stage], 0.0 if is_rough else found.bound
    if is_rough:
        other = cut(problem, atoms, rates.without_messages, slack=slack)
        stages, bound = [found.stage, other.stage], other.bound
    elif len(atoms) > DENSE and problem.is_single and rates.are_alike:
        stages.append(_by_probing(Runs(atoms), rates, slack).stage)
    return Cut(min(stages, key=lambda stage: Judged(problem, atoms, stage).score), bound)


def stages_of(bounds: list[int] | Ints) -> Ints:
    """The stage of every atom from the boundaries of the stages, first and last included."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def _by_probing(runs: Runs, rates: Rates, slack: float) -> Cut:
    least = shortest(runs.weighing, rates.slowness)
    return Cut(stages_of(_cheapest(runs, rates.slowness, nudged(least * (1 + slack)))), least)


def _cheapest(runs: Runs, slowness: Floats, limit: float) -> list[int]:
    """The boundaries that keep the limit and cost the fewest bytes."""
    widest = int((_AREA / len(slowness)) ** 0.5)
    # The last places where the limit can be kept are a cut that keeps it, so those must stay.
    ranges = [(max(low, high - widest), high) for low, high in reaches(runs.weighing, slowness, limit)]
    fewest, parents = np.zeros(1), []
    for factor, (begin, end) in zip(slowness, pairwise(ranges), strict=True):
        box = Box(*begin, *end)
        is_run = np.arange(begin[0], begin[1] + 1)[:, None] < np.arange(end[0], end[1] + 1)
        is_run &= factor * runs.weighing.over(box) <= limit
        total = fewest[:, None] + np.where(is_run, runs.bytes(box), np.inf)
        parents.append(total.argmin(axis=0))
        fewest = total.min(axis=0)
    chosen = [0]
    for parent in reversed(parents):
        chosen.append(int(parent[chosen[-1]]))
    return [low + offset for (low, _), offset in zip(ranges, reversed(chosen), strict=True)]


def _by_pairs(runs: Runs, rates: Rates, slack: float) -> Cut:
    even = float(runs.weighing.added[-1] / (1 / rates.slowness).sum())
    # Runs that take much longer than an even share alone are looked at only if it does not go without them.
    for limit in (2 * even, 8 * even, np.inf):
        chains = Chains(_levels(runs, rates, limit), len(rates.slowness), len(runs.atoms) + 1)
        bound = least = chains.least_load(rates.loads)
        if least * (1 + slack) <= limit:
            break
    loads: Loads = rates.loads
    if np.isinf(least):
        # Nothing fits: then what comes nearest, so that the error can say what is short.
        loads = rates.fullness
        least = chains.least_load(loads)
    return Cut(stages_of(chains.fewest_bytes(loads, nudged(least * (1 + slack)))), bound)


def _levels(runs: Runs, rates: Rates, limit: float) -> Levels:
    """Every place as an end, the places before as begins unless the run alone would exceed the limit."""
    number, fastest = len(runs.atoms), float(rates.slowness.min())

    def levels() -> Iterator[Level]:
        for low in range(1, number + 1, _COLUMNS):
            high = min(low + _COLUMNS - 1, number)
            first = min(runs.weighing.nearest(low, nudged(limit / fastest)), low - 1)
            bill = runs.bill(Box(first, high - 1, low, high), with_sent=not rates.overlaps)
            for end in range(low, high + 1):
                some = Bill(*(part[: end - first, [end - low]] for part in bill))
                yield Level(np.arange(first, end), np.array([end]), some)

    return levels
