"""mpipe: a rank may hold several stages that are not neighbours, as many as make the ranks even (mixed-pipe).

Choose it when blocks differ so much that no cut into one run per rank is even: eight blocks that cost 4 and eight that
cost 1 give the busiest of 4 ranks 12 in runs, and 10 with two stages per rank. It chooses the number of stages and
their placement: loops and vees, which the schedules of the table run, and free placements, in which the heaviest blocks
are dealt out first. More stages mean more messages: they must be worth it. If the problem has a placement, that one is
kept. The idea is that of FTPipe (Eliad et al., 2021).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Placement, as_int, is_finite
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.search.bill import Rates
from penstock.partitioners.search.blocks import dealt, pieces
from penstock.partitioners.search.bounds import lower_bound
from penstock.partitioners.search.cutting import DENSE, cut, stages_of
from penstock.partitioners.search.judge import Judged
from penstock.partitioners.search.outcome import division
from penstock.partitioners.search.pairing import evened
from penstock.partitioners.search.runs import Runs
from penstock.partitioners.search.thinning import thinned


@dataclass(frozen=True)
class MPipe(Partitioner):
    """Runs of the model's order, and a placement for them."""

    name = "mpipe"
    stages_per_rank: int = 4
    """at most"""
    worth: float = 0.01
    """what more stages must take off the busiest rank, as a share"""

    def __post_init__(self) -> None:
        if (as_int(self.stages_per_rank) or 0) < 1:
            raise PartitionError("stages per rank must be a whole number, 1 or more", given=repr(self.stages_per_rank))
        if not is_finite(self.worth) or self.worth < 0:
            raise PartitionError("worth is a share, 0 or more", worth=repr(self.worth))

    def divide(self, problem: Problem) -> Division:
        if problem.placement is not None:
            found = cut(problem, problem.atoms, Rates.of(problem))
            return division(problem, found.stage, "runs for the given placement", bounds=(0.0, found.bound))
        best: Judged | None = None
        for judged in self._candidates(problem):
            if best is None or (judged.score.excess, judged.score.busiest) < self._wanted(best):
                best = judged
            if best.score.excess == 0 and best.score.busiest <= lower_bound(problem) * (1 + self.worth):
                break
        assert best is not None
        count = best.num_stages / problem.cluster.ranks
        return division(best.problem, best.stage, f"{count:g} stages per rank, evened out over the ranks")

    def _wanted(self, best: Judged) -> tuple[float, float]:
        return best.score.excess, best.score.busiest * (1 - self.worth)

    def _candidates(self, problem: Problem) -> Iterator[Judged]:
        """From few stages to many."""
        ranks, most = problem.cluster.ranks, len(problem.atoms)
        for count in range(1, self.stages_per_rank + 1):
            placements = [Placement.loop(ranks, count), *([Placement.vee(ranks)] if count == 2 else [])]
            for placement in placements if count * ranks <= most else ():
                placed = problem.on(placement)
                found = cut(placed, placed.atoms, Rates.of(placed), is_brief=count > 2)
                yield Judged(placed, placed.atoms, found.stage)
            if ranks < count * ranks <= most:
                yield from _dealt_out(problem, count * ranks)


def _dealt_out(problem: Problem, number: int) -> Iterator[Judged]:
    """A free placement: pieces dealt to ranks, neighbours on one rank joined, their boundaries moved."""
    group = thinned(Runs(problem.atoms), max(DENSE, number))
    atoms = problem.atoms.merged(group)
    places = np.array(pieces(problem.graph, atoms, number))
    weights = np.diff(Runs(atoms).weighing.added[places])
    rank = np.array(dealt(weights, problem.cluster.ranks))
    if len(set(rank.tolist())) < problem.cluster.ranks:
        return
    starts = np.flatnonzero(np.diff(rank, prepend=-1))
    placed = problem.on(Placement(_from_zero(rank[starts].tolist(), problem)))
    bounds = evened(placed.placed, Runs(atoms), Rates.of(placed), np.append(places[starts], len(atoms)))
    yield Judged(placed, placed.atoms, stages_of(bounds)[group])


def _from_zero(ranks: list[int], problem: Problem) -> tuple[int, ...]:
    """Where ranks are alike, they are numbered by their first stage."""
    if problem.cluster.slowness or problem.cluster.links or len(set(problem.cluster.limits)) > 1:
        return tuple(ranks)
    number: dict[int, int] = {}
    return tuple(number.setdefault(rank, len(number)) for rank in ranks)
