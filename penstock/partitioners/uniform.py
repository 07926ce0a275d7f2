"""uniform: the same number of weighty nodes in every stage, in the order of the model.

Choose it when blocks are alike, or as a first try before anything is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Graph, Partition, as_int
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.contiguous import cut_at, cut_places
from penstock.partitioners.search.cutting import stages_of
from penstock.partitioners.search.outcome import division


@dataclass(frozen=True)
class Uniform(Partitioner):
    """Nodes with parameters count (all nodes, if too few have any), seconds and bytes do not."""

    name = "uniform"

    def divide(self, problem: Problem) -> Division:
        number, uses = len(problem.atoms), problem.atoms.tensors.uses
        weighty = np.unique(uses.atom[problem.atoms.tensors.parameters[uses.thing] > 0])
        weighty = weighty[weighty < number]
        chosen = weighty.tolist() if len(weighty) >= 2 * problem.num_stages else list(range(number))
        cuts = _spread(chosen, list(range(1, number)), problem.num_stages)
        why = "equal numbers of nodes with parameters"
        return division(problem, stages_of([0, *cuts, number]), why, seeks_room=False)


def uniform(graph: Graph, num_stages: int) -> Partition:
    """The same before anything is known of costs."""
    count = as_int(num_stages)
    if count is None or count < 1:
        raise PartitionError("the number of stages must be a whole number, 1 or more", stages=repr(num_stages))
    allowed = cut_places(graph)
    if len(allowed) < count - 1:
        closed = len(graph.nodes) - 1 - len(allowed)
        raise PartitionError(
            "the graph has fewer places to cut than asked for",
            places=len(allowed),
            stages=num_stages,
            hint="memory or a buffer that is written keeps nodes together: fewer stages" if closed else "fewer stages",
        )
    return cut_at(graph, _spread(_weighty(graph, count), allowed, count))


def _spread(weighty: Sequence[int], allowed: Sequence[int], num_stages: int) -> list[int]:
    """Cuts with about equally many of the weighty between them; there are at least as many places as cuts."""
    cuts: list[int] = []
    for number in range(1, num_stages):
        wish = weighty[round(number * len(weighty) / num_stages)]
        free = [place for place in allowed if not cuts or place > cuts[-1]]
        # Leave room for the cuts that are still to come.
        free = free[: len(free) - (num_stages - 1 - number)]
        cuts.append(min(free, key=lambda place: abs(place - wish)))
    return cuts


def _weighty(graph: Graph, num_stages: int) -> list[int]:
    nodes = [(place, node) for place, node in enumerate(graph.nodes) if not node.from_inputs]
    with_parameters = [place for place, node in nodes if node.parameters]
    if len(with_parameters) >= 2 * num_stages:
        return with_parameters
    return [place for place, _ in nodes] or list(range(len(graph.nodes)))
