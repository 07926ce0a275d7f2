"""Cuts the model's order into runs with the same number of nodes with parameters.

Choose it when blocks are equal, or as a first try before anything is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Graph, Partition, as_int
from penstock.partitioners.base import Division, Partitioner, Problem, too_few_places
from penstock.partitioners.explicit import cut_at, cut_places
from penstock.partitioners.score import division
from penstock.partitioners.search.boundaries import stages_of


@dataclass(frozen=True)
class Uniform(Partitioner):
    """Counts nodes with parameters (all nodes, if too few have any) and ignores seconds and bytes."""

    name = "uniform"
    is_tried = False

    def divide(self, problem: Problem) -> Division:
        number, uses = len(problem.atoms), problem.atoms.tensors.uses
        counted = np.unique(uses.atom[problem.atoms.tensors.parameters[uses.item] > 0])
        counted = counted[counted < number]
        chosen = counted.tolist() if len(counted) >= 2 * problem.num_stages else list(range(number))
        cuts = _spread(chosen, list(range(1, number)), problem.num_stages)
        why = "equal numbers of nodes with parameters"
        return division(problem, stages_of([0, *cuts, number]), why, keeps_limits=False)


def uniform(graph: Graph, num_stages: int) -> Partition:
    """Returns the partition that `Uniform` makes, for a graph that has no profile."""
    count = as_int(num_stages)
    if count is None or count < 1:
        raise PartitionError("the number of stages must be a whole number, 1 or more", stages=repr(num_stages))
    allowed = cut_places(graph)
    if len(allowed) < count - 1:
        raise too_few_places(len(allowed), count, graph)
    nodes = [(place, node) for place, node in enumerate(graph.nodes) if not node.from_inputs]
    counted = [place for place, node in nodes if node.parameters]
    if len(counted) < 2 * count:
        counted = [place for place, _ in nodes] or list(range(len(graph.nodes)))
    return cut_at(graph, _spread(counted, allowed, count))


def _spread(counted: Sequence[int], allowed: Sequence[int], num_stages: int) -> list[int]:
    """Cuts with about equally many of the counted nodes between them; there are at least as many places as cuts."""
    cuts: list[int] = []
    for number in range(1, num_stages):
        # There may be fewer counted nodes than stages, as input-only nodes are not counted but may be cut apart.
        wanted = counted[min(round(number * len(counted) / num_stages), len(counted) - 1)]
        free = [place for place in allowed if not cuts or place > cuts[-1]]
        # Leave room for the remaining cuts.
        free = free[: len(free) - (num_stages - 1 - number)]
        cuts.append(min(free, key=lambda place: abs(place - wanted)))
    return cuts
