"""Contiguous: stages as consecutive runs of nodes, cut only where the graph allows it."""

from itertools import pairwise

from penstock.errors import PartitionError
from penstock.ir import Graph, Partition
from penstock.partitioners.together import together


def cut_places(graph: Graph) -> list[int]:
    """The places between nodes, counted from 1, where no memory is written on both sides or after a value left.

    What uses a buffer that the forward writes stays together too.
    """
    closed = [False] * (len(graph.nodes) + 1)
    for group in together(graph):
        for place in range(group[0] + 1, group[-1] + 1):
            closed[place] = True
    return [place for place in range(1, len(graph.nodes)) if not closed[place]]


def cut_at(graph: Graph, places: list[int]) -> Partition:
    """The partition with a cut before the node of each place."""
    names = [node.name for node in graph.nodes]
    bounds = [0, *sorted(places), len(names)]
    if len(set(bounds)) < len(bounds):
        raise PartitionError("an empty stage", cuts=sorted(places), nodes=len(names))
    return Partition(tuple(tuple(names[low:high]) for low, high in pairwise(bounds)))
