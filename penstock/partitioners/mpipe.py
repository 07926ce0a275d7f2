"""Gives a rank several stages that are not neighbours, as many as make the ranks even (mixed-pipe).

Choose it when blocks differ so much that no cut into one run per rank is even: eight blocks that cost 4 and eight that
cost 1 give the busiest of 4 ranks 12 in runs, and 10 with two stages per rank. It chooses the number of stages and
their placement: loops and vees, which the schedules of the table run, and free placements, in which the heaviest blocks
are assigned first. More stages mean more messages: they must be worth it. If the problem has a placement, that one is
kept. The idea is that of FTPipe (Eliad et al., 2021).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Graph, Placement, as_int, is_finite
from penstock.partitioners.atoms import Atoms, Floats
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.costs import CostRates, Runs
from penstock.partitioners.score import Score, division, lower_bound
from penstock.partitioners.search.boundaries import shift_boundaries
from penstock.partitioners.search.contiguous import DENSE, coarsen, cut_runs, stages_of


@dataclass(frozen=True)
class MPipe(Partitioner):
    """Cuts the model's order into runs and chooses a placement for them."""

    name = "mpipe"
    chooses_placement = True
    stages_per_rank: int = 4
    """at most"""
    worth: float = 0.01
    """share by which more stages must relieve the busiest rank"""

    def __post_init__(self) -> None:
        if (as_int(self.stages_per_rank) or 0) < 1:
            raise PartitionError("stages per rank must be a whole number, 1 or more", got=repr(self.stages_per_rank))
        if not is_finite(self.worth) or self.worth < 0:
            raise PartitionError("worth must be a share, 0 or more", worth=repr(self.worth))

    def divide(self, problem: Problem) -> Division:
        if problem.placement is not None:
            found = cut_runs(problem, problem.atoms, CostRates.of(problem))
            return division(problem, found.stage, "runs for the given placement", contiguous_bound=found.bound)
        best: Score | None = None
        for score in self._candidates(problem):
            if best is None or score.key[:2] < (best.key.excess, best.key.busiest * (1 - self.worth)):
                best = score
            if best.key.excess == 0 and best.key.busiest <= lower_bound(problem) * (1 + self.worth):
                break
        assert best is not None
        count = best.num_stages / problem.cluster.ranks
        return division(best.problem, best.stage, f"{count:g} stages per rank, evened out over the ranks")

    def _candidates(self, problem: Problem) -> Iterator[Score]:
        """From few stages to many."""
        ranks, most = problem.cluster.ranks, len(problem.atoms)
        for count in range(1, self.stages_per_rank + 1):
            placements = [Placement.loop(ranks, count), *([Placement.vee(ranks)] if count == 2 else [])]
            for placement in placements if count * ranks <= most else ():
                placed = problem.on(placement)
                found = cut_runs(placed, placed.atoms, CostRates.of(placed), is_brief=count > 2)
                yield Score(placed, placed.atoms, found.stage)
            if ranks < count * ranks <= most:
                yield from _free_placement(problem, count * ranks)


def _free_placement(problem: Problem, number: int) -> Iterator[Score]:
    """Pieces assigned to ranks, neighbours on one rank joined, their boundaries shifted."""
    group = coarsen(Runs(problem.atoms), max(DENSE, number))
    atoms = problem.atoms.merged(group)
    places = np.array(pieces(problem.graph, atoms, number))
    weights = np.diff(Runs(atoms).seconds.added[places])
    rank = np.array(assign_ranks(weights, problem.cluster.ranks))
    if len(set(rank.tolist())) < problem.cluster.ranks:
        return
    starts = np.flatnonzero(np.diff(rank, prepend=-1))
    ranks = tuple(rank[starts].tolist())
    cluster = problem.cluster
    if not (cluster.slowness or cluster.links or len(set(cluster.limits)) > 1):
        # Equal ranks are numbered by their first stage.
        numbers: dict[int, int] = {}
        ranks = tuple(numbers.setdefault(each, len(numbers)) for each in ranks)
    placed = problem.on(Placement(ranks))
    bounds = np.append(places[starts], len(atoms))
    bounds = shift_boundaries(placed.placed, Runs(atoms), CostRates.of(placed), bounds)
    yield Score(placed, placed.atoms, stages_of(bounds)[group])


def block_of(module: str) -> str:
    """Returns the name of the block that a module is part of: up to the first number in it, else its first word."""
    words = module.split(".")
    for length, word in enumerate(words, 1):
        if word.isdigit():
            return ".".join(words[:length])
    return words[0]


def pieces(graph: Graph, atoms: Atoms, number: int) -> list[int]:
    """Returns boundaries of blocks, joined until there are at most `number`, first and last boundary included.

    The two neighbours that are lightest together are joined; of equally light ones those that exchange most bytes.
    """
    names = [block_of(graph.nodes[nodes[0]].module) for nodes in atoms.nodes]
    places = [0, *(at for at in range(1, len(atoms)) if names[at] != names[at - 1]), len(atoms)]
    if len(places) - 1 < number:
        places = list(range(len(atoms) + 1))
    runs = Runs(atoms)
    added, crossing = runs.seconds.added, runs.bytes_to_end
    while len(places) - 1 > number:
        weights = added[places[2:]] - added[places[:-2]]
        del places[1 + int(np.lexsort((-crossing[places[1:-1]], weights))[0])]
    return places


def assign_ranks(weights: Floats, num_ranks: int) -> list[int]:
    """Returns a rank per piece: the heaviest piece first, to the least loaded rank; of several to a neighbour's."""
    loads, rank = np.zeros(num_ranks), np.full(len(weights) + 2, -1)
    for piece in np.argsort(-weights, kind="stable").tolist():
        least = np.flatnonzero(loads <= loads.min() * (1 + 1e-9))
        beside = [other for other in (rank[piece], rank[piece + 2]) if other in least]
        rank[piece + 1] = beside[0] if beside else least[0]
        loads[rank[piece + 1]] += weights[piece]
    return [int(each) for each in rank[1:-1]]
