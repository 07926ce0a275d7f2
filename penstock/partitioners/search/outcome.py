"""outcome: stages of atoms as the Division that a partitioner returns."""

import math

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Partition
from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Ints
from penstock.partitioners.base import Division, Problem
from penstock.partitioners.search.bounds import lower_bound
from penstock.partitioners.search.judge import Judged


def partition_of(problem: Problem, atoms: Atoms, stage: Ints) -> Partition:
    """The nodes of every stage in the graph's order; those from inputs only are with the first stage to need them."""
    number = int(stage.max()) + 1
    everyone = np.append(stage, number - 1)
    places: list[list[int]] = [[] for _ in range(number)]
    for nodes, at in zip(atoms.nodes, stage.tolist(), strict=True):
        places[at] += nodes
    free = atoms.free
    first = np.full(len(free.nodes), number)
    np.minimum.at(first, free.uses.thing, everyone[free.uses.atom])
    owner = np.where(free.home >= 0, everyone[free.home], first)
    for place, at in zip(free.nodes, owner.tolist(), strict=True):
        places[at].append(place)
    names = [node.name for node in problem.graph.nodes]
    return Partition(tuple(tuple(names[place] for place in sorted(nodes)) for nodes in places))


def division(
    problem: Problem, stage: Ints, why: str, *, bounds: tuple[float, float] = (0.0, 0.0), seeks_room: bool = True
) -> Division:
    """Judge the stages of the atoms; `bounds` are proven besides, for any partition and for runs of the atoms.

    `seeks_room` says that limits of memory were kept in mind while the stages were chosen.
    """
    judged = Judged(problem, problem.atoms, stage)
    _check_memory(judged, seeks_room)
    busiest = float(judged.loads.max())
    least = min(max(lower_bound(problem), bounds[0]), busiest)
    return Division(
        partition_of(problem, problem.atoms, stage),
        problem.placed,
        tuple(judged.loads.tolist()),
        least,
        busiest if math.isclose(bounds[1], busiest, rel_tol=1e-9) else max(least, bounds[1]),
        round(judged.cut_bytes),
        why,
    )


def _check_memory(judged: Judged, seeks_room: bool) -> None:
    limit = judged.problem.limit_of
    short = judged.memory - limit
    rank = int(short.argmax())
    if short[rank] <= 0:
        return
    ways_out = "more ranks, fewer microbatches in flight, recomputation, or an optimizer that holds less"
    raise PartitionError(
        "no cut was found that keeps the limits of memory" if seeks_room else "the cut exceeds the limits of memory",
        rank=rank,
        needs=round(judged.memory[rank]),
        limit=round(limit[rank]),
        short_by=round(short[rank]),
        all_ranks_need=round(judged.memory.sum()),
        hint=ways_out if seeks_room else f"linear or auto, which keep limits in mind; {ways_out}",
    )
