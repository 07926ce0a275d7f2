"""multilevel: partitions of few large atoms, improved again and again while the atoms are taken apart."""

import numpy as np

from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Ints
from penstock.partitioners.base import Problem
from penstock.partitioners.search.bill import Rates
from penstock.partitioners.search.contraction import halved
from penstock.partitioners.search.cutting import cut
from penstock.partitioners.search.judge import Judged
from penstock.partitioners.search.moves import improved
from penstock.partitioners.search.orders import ordered, other_orders

_ATOMS_PER_STAGE = 8
_NOISE = (1.0, 1.5, 2.0, 3.0)
"""by how many stages atoms change places in the orders that are tried; by less than one they stay in their stages"""
_MOST_TURNS, _TURNS_TIMES_ATOMS = 8, 800
_SHARE = 0.25
"""the heaviest atom that is made by joining, as a share of what a stage gets"""


def best_of(problem: Problem, attempts: int) -> Judged:
    """The best partition from cuts of several orders, of the atoms as they are and of larger ones."""
    rates = Rates.of(problem)
    found = [_cut(problem, problem.atoms, rates.without_messages), _from_coarse(problem, rates)]
    found += [cut_in_order(problem, position, rates) for position in other_orders(problem.atoms, attempts)]
    best = min(map(improved, sorted(found, key=lambda judged: judged.score)[:3]), key=lambda judged: judged.score)
    return _recut(best, rates, attempts)


def _cut(problem: Problem, atoms: Atoms, rates: Rates) -> Judged:
    return Judged(problem, atoms, cut(problem, atoms, rates, is_brief=True).stage)


def cut_in_order(problem: Problem, position: Ints, rates: Rates, is_brief: bool = True) -> Judged:
    """The atoms of a problem, cut into runs of another order."""
    found = cut(problem, problem.atoms.merged(position), rates, is_brief=is_brief)
    return Judged(problem, problem.atoms, found.stage[position])


def _recut(best: Judged, rates: Rates, attempts: int) -> Judged:
    """Cuts of orders in which the best partition is one of runs, and by turns of orders that shake it up."""
    random = np.random.default_rng(1)
    # Few atoms are cut in no time, and then hang together too much for one of them to move alone.
    turns = max(attempts, min(_MOST_TURNS * attempts, _TURNS_TIMES_ATOMS // len(best.atoms)))
    for turn in range(turns):
        position = ordered(best.atoms, best.stage + _NOISE[turn % len(_NOISE)] * random.random(len(best.atoms)))
        again = cut_in_order(best.problem, position, rates, is_brief=turn < turns - 1)
        best = min(best, improved(again), key=lambda judged: judged.score)
    return best


def _from_coarse(problem: Problem, rates: Rates) -> Judged:
    heaviest = _SHARE * float(problem.atoms.seconds.sum()) / problem.num_stages
    levels, groups = [problem.atoms], []
    while len(levels[-1]) > _ATOMS_PER_STAGE * problem.num_stages:
        group = halved(levels[-1], heaviest)
        if int(group.max()) + 1 == len(levels[-1]):
            break
        groups.append(group)
        levels.append(levels[-1].merged(group))
    judged = improved(_cut(problem, levels[-1], rates))
    for atoms, group in zip(levels[-2::-1], reversed(groups), strict=True):
        judged = improved(Judged(problem, atoms, judged.stage[group]))
    return judged
