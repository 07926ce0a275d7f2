"""Searches partitions: cuts of several topological orders, and multilevel coarsening and refinement of atoms."""

import heapq

import numpy as np

from penstock.ir import Bools, Floats, Ints
from penstock.partitioners.atoms import Atoms
from penstock.partitioners.base import Problem
from penstock.partitioners.costs import CostRates
from penstock.partitioners.score import Score
from penstock.partitioners.search.contiguous import cut_runs
from penstock.partitioners.search.local import improve

_ATOMS_PER_STAGE = 8
"""at most that many are left after joining"""
_NOISE = (1.0, 1.5, 2.0, 3.0)
"""by how many stages atoms change places in the orders that are tried; by less than one they stay in their stages"""
_MOST_TURNS, _TURNS_TIMES_ATOMS = 8, 800
"""turns of the search per attempt, and turns times atoms: few atoms get more turns"""
_SHARE = 0.25
"""the heaviest atom that is made by joining, as a share of an even stage"""


def search_partitions(problem: Problem, attempts: int) -> Score:
    """Returns the best partition from cuts of several orders, of the atoms as they are and of larger ones."""
    rates = CostRates.of(problem)
    found = [_cut(problem, problem.atoms, rates.without_messages), _multilevel(problem, rates)]
    found += [cut_in_order(problem, position, rates) for position in other_orders(problem.atoms, attempts)]
    best = min(map(improve, sorted(found)[:3]))
    # Cut again in orders in which the stages of the best partition are runs, with noise that mixes neighbouring stages.
    random = np.random.default_rng(1)
    # Cutting few atoms is fast, and with few atoms moves of single ones seldom help.
    turns = max(attempts, min(_MOST_TURNS * attempts, _TURNS_TIMES_ATOMS // len(best.atoms)))
    for turn in range(turns):
        position = topological_order(
            best.atoms, best.stage + _NOISE[turn % len(_NOISE)] * random.random(len(best.atoms))
        )
        again = cut_in_order(problem, position, rates, is_brief=turn < turns - 1)
        best = min(best, improve(again))
    return best


def _cut(problem: Problem, atoms: Atoms, rates: CostRates) -> Score:
    return Score(problem, atoms, cut_runs(problem, atoms, rates, is_brief=True).stage)


def cut_in_order(problem: Problem, position: Ints, rates: CostRates, is_brief: bool = True) -> Score:
    """Returns the atoms of a problem cut into runs of another order, which has a position per atom."""
    found = cut_runs(problem, problem.atoms.merged(position), rates, is_brief=is_brief)
    return Score(problem, problem.atoms, found.stage[position])


def _multilevel(problem: Problem, rates: CostRates) -> Score:
    """A cut of few large atoms, improved at every level while they are taken apart."""
    heaviest = _SHARE * float(problem.atoms.seconds.sum()) / problem.num_stages
    levels, groups = [problem.atoms], []
    while len(levels[-1]) > _ATOMS_PER_STAGE * problem.num_stages:
        group = pair_up(levels[-1], heaviest)
        if int(group.max()) + 1 == len(levels[-1]):
            break
        groups.append(group)
        levels.append(levels[-1].merged(group))
    score = improve(_cut(problem, levels[-1], rates))
    for atoms, group in zip(levels[-2::-1], reversed(groups), strict=True):
        score = improve(Score(problem, atoms, score.stage[group]))
    return score


# Joining atoms. An atom with a single reader may be joined with that reader, and an atom that reads from a single other
# one with that one: there is no second path between the two that could close a cycle.


def join_idle_atoms(atoms: Atoms, at_least: int) -> Ints:
    """Returns a group per atom in which atoms without seconds are joined with their only reader or only source.

    In seconds no partition is lost that way, unless fewer than `at_least` groups are left; then none are joined.
    """
    group = np.arange(len(atoms))
    while True:
        current = atoms.merged(group)
        edges, inputs = current.edges, current.input_only
        # An atom alone in a stage also runs the input-only nodes that it needs; the last one reads the outputs.
        needed = np.bincount(inputs.uses.atom, inputs.seconds[inputs.uses.item], minlength=len(current) + 1)
        is_idle = current.seconds + needed[: len(current)] == 0
        has_one_reader, has_one_source = _single_neighbours(current)
        found = _match(current, (is_idle & has_one_reader)[edges.item] | (is_idle & has_one_source)[edges.atom])
        if int(found.max()) + 1 == len(current):
            return group
        if int(found.max()) + 1 < at_least:
            return np.arange(len(atoms))
        group = found[group]


def pair_up(atoms: Atoms, heaviest: float) -> Ints:
    """Returns a group per atom: pairs no heavier than `heaviest` together, and single atoms."""
    edges, (has_one_reader, has_one_source) = atoms.edges, _single_neighbours(atoms)
    is_safe = has_one_reader[edges.item] | has_one_source[edges.atom]
    return _match(atoms, is_safe & (atoms.seconds[edges.item] + atoms.seconds[edges.atom] <= heaviest))


def _match(atoms: Atoms, is_allowed: Bools) -> Ints:
    """Groups of one or two atoms, numbered in an order in which they can run; `is_allowed` has an entry per edge.

    Of the allowed edges, those with most bytes come first.
    """
    edges = atoms.edges
    chosen = np.flatnonzero(is_allowed)
    source, target = edges.item[chosen], edges.atom[chosen]
    by_bytes = np.argsort(-atoms.edge_bytes[chosen], kind="stable")
    partner = np.arange(len(atoms))
    for before, after in zip(source[by_bytes].tolist(), target[by_bytes].tolist(), strict=True):
        if partner[before] == before and partner[after] == after:
            partner[before], partner[after] = after, before
    _, group = np.unique(np.minimum(partner, np.arange(len(atoms))), return_inverse=True)
    number = int(group.max()) + 1
    source, target = group[edges.item], group[edges.atom]
    group_edges = np.unique(np.stack((source, target))[:, source != target], axis=1)
    followers = np.split(group_edges[1], np.searchsorted(group_edges[0], np.arange(1, number)))
    return _topological(followers, np.bincount(group_edges[1], minlength=number), np.arange(number))[group]


def _single_neighbours(atoms: Atoms) -> tuple[Bools, Bools]:
    """Whether each atom has a single reader, and whether it has a single source."""
    readers, sources = (np.bincount(ends, minlength=len(atoms)) for ends in (atoms.edges.item, atoms.edges.atom))
    return readers == 1, sources == 1


def other_orders(atoms: Atoms, number: int) -> list[Ints]:
    """Returns topological orders other than the model's own, which have other cuts: depth-first, then at random.

    Each is a position per atom. The seed is fixed, so that results are reproducible.
    """
    random = np.random.default_rng(0)
    at_random = [topological_order(atoms, random.random(len(atoms))) for _ in range(number - 1)]
    return [_depth_first_order(atoms), *at_random]


def topological_order(atoms: Atoms, priority: Floats) -> Ints:
    """Returns a position per atom; of the atoms that can be next, the one with the least priority comes first."""
    waiting = np.array([len(found) for found in atoms.predecessors], dtype=np.int64)
    return _topological(atoms.successors, waiting, priority)


def _topological(followers: "list[Ints] | tuple[Ints, ...]", waiting: Ints, priority: Floats | Ints) -> Ints:
    """Positions in the topological order; `waiting` counts the predecessors of each."""
    left, keys = waiting.tolist(), priority.tolist()
    ready = [(keys[at], at) for at, number in enumerate(left) if not number]
    heapq.heapify(ready)
    position = np.empty(len(left), dtype=np.int64)
    for turn in range(len(left)):
        _, at = heapq.heappop(ready)
        position[at] = turn
        for other in followers[at].tolist():
            left[other] -= 1
            if not left[other]:
                heapq.heappush(ready, (keys[other], other))
    return position


def _depth_first_order(atoms: Atoms) -> Ints:
    """The position of every atom in a depth-first order, which completes one branch before it begins the next."""
    waiting = [len(found) for found in atoms.predecessors]
    ready = [atom for atom, number in enumerate(waiting) if not number][::-1]
    position = np.empty(len(atoms), dtype=np.int64)
    for turn in range(len(atoms)):
        atom = ready.pop()
        position[atom] = turn
        for other in atoms.successors[atom].tolist()[::-1]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return position
