"""Gives a rank several stages that are not neighbours, as many as make the ranks even (mixed-pipe).

Choose it when blocks differ so much that no cut into one run per rank is even: eight blocks that cost 4 and eight that
cost 1 give the busiest of 4 ranks 12 in runs, and 10 with two stages per rank. It chooses the number of stages and
their placement: loops and vees, which the schedules of the table run, and free placements, in which the heaviest blocks
are assigned first. More stages mean more messages: they must be worth it. If the problem has a placement, that one is
kept. The idea is that of FTPipe (Eliad et al., 2021). `mixed` lets another partitioner cut for the same placements.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Floats, Graph, Placement, is_count, is_finite
from penstock.partitioners.atoms import Atoms
from penstock.partitioners.base import Division, Partitioner, Problem, too_few_places
from penstock.partitioners.costs import CostRates, Runs
from penstock.partitioners.score import Score, division, lower_bound
from penstock.partitioners.search.boundaries import shift_boundaries, stages_of
from penstock.partitioners.search.contiguous import DENSE, coarsen, cut_runs


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
        if not is_count(self.stages_per_rank):
            raise PartitionError("stages per rank must be a whole number, 1 or more", got=repr(self.stages_per_rank))
        if not is_finite(self.worth) or self.worth < 0:
            raise PartitionError("worth must be a share, 0 or more", worth=repr(self.worth))

    def divide(self, problem: Problem) -> Division:
        if problem.placement is not None:
            found = cut_runs(problem, problem.atoms, CostRates.of(problem))
            return division(problem, found.stage, "runs for the given placement", contiguous_bound=found.bound)
        best: Score | None = None
        for placement, score in self.placements(problem):
            if score is None:
                placed = problem.on(placement)
                is_brief = placement.num_stages > 2 * placement.num_ranks
                found = cut_runs(placed, placed.atoms, CostRates.of(placed), is_brief=is_brief)
                score = Score(placed, placed.atoms, found.stage)
            if best is None or score.key[:2] < (best.key.excess, best.key.busiest * (1 - self.worth)):
                best = score
            if best.key.excess == 0 and best.key.busiest <= lower_bound(problem) * (1 + self.worth):
                break
        assert best is not None
        count = best.num_stages / problem.cluster.ranks
        return division(best.problem, best.stage, f"{count:g} stages per rank, evened out over the ranks")

    def placements(self, problem: Problem) -> Iterator[tuple[Placement, Score | None]]:
        """Yields placements from few stages to many; free placements with the runs that they were made for."""
        ranks, most = problem.cluster.ranks, len(problem.atoms)
        for count in range(1, self.stages_per_rank + 1):
            if count * ranks > most:
                return
            yield Placement.loop(ranks, count), None
            if count == 2:
                yield Placement.vee(ranks), None
            if count > 1:
                for score in _free_placement(problem, count * ranks):
                    yield score.problem.placed, score


def mixed(member: Partitioner, problem: Problem) -> Division:
    """Returns the division of a partitioner for the placement, of those that mpipe considers, that suits it best."""
    options = MPipe()
    best: Division | None = None
    refusals: list[PartitionError] = []
    for placement, _ in options.placements(problem):
        try:
            found = member(problem.on(placement))
        except PartitionError as error:
            refusals.append(error)
            continue
        if best is None or found.bottleneck_seconds < best.bottleneck_seconds * (1 - options.worth):
            best = found
        if best.bottleneck_seconds <= lower_bound(problem) * (1 + options.worth):
            break
    if best is None:
        # Without refusals no placement was tried, as there are fewer atoms than ranks.
        raise refusals[0] if refusals else too_few_places(len(problem.atoms) - 1, problem.num_stages, problem.graph)
    count = best.placement.num_stages / best.placement.num_ranks
    return best if count == 1 else replace(best, why=f"{best.why}; mixed pipe, {count:g} stages per rank")


def _free_placement(problem: Problem, number: int) -> Iterator[Score]:
    """Pieces assigned to ranks, neighbours on one rank joined, their boundaries shifted."""
    group = coarsen(Runs(problem.atoms), max(DENSE, number))
    atoms = problem.atoms.merged(group)
    places = np.array(pieces(problem.graph, atoms, number))
    weights = np.diff(Runs(atoms).seconds.prefix[places])
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
    boundaries = np.append(places[starts], len(atoms))
    boundaries = shift_boundaries(placed.placed, Runs(atoms), CostRates.of(placed), boundaries)
    yield Score(placed, placed.atoms, stages_of(boundaries)[group])


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
    prefix, crossing = runs.seconds.prefix, runs.bytes_to_end
    while len(places) - 1 > number:
        weights = prefix[places[2:]] - prefix[places[:-2]]
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
