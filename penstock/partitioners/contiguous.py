"""Contiguous: stages as consecutive runs of nodes, cut only where the graph allows it."""

from itertools import pairwise

from penstock.errors import PartitionError
from penstock.ir.graph import Graph
from penstock.ir.partition import Partition


def cut_places(graph: Graph) -> list[int]:
    """The places between nodes, counted from 1, where no memory is written on both sides or after a value left.

    What uses a buffer that the forward writes stays together too.
    """
    position = {node.name: place for place, node in enumerate(graph.nodes)}
    closed = [False] * (len(graph.nodes) + 1)
    for group in graph.storage:
        if not group.writers:
            continue
        values = set(group.values)
        places = [position[graph.makers[value].name] for value in group.values if value in graph.makers]
        places += [position[writer] for writer in group.writers]
        last = max(position[writer] for writer in group.writers)
        places += [place for place, node in enumerate(graph.nodes[: last + 1]) if values & set(node.reads)]
        _close(closed, places)
    for nodes in graph.updated.values():
        _close(closed, [position[node.name] for node in nodes])
    return [place for place in range(1, len(graph.nodes)) if not closed[place]]


def _close(closed: list[bool], places: list[int]) -> None:
    """No cut between the first and the last of some nodes."""
    for place in range(min(places) + 1, max(places) + 1):
        closed[place] = True


def cut_at(graph: Graph, places: list[int]) -> Partition:
    """The partition with a cut before the node of each place."""
    names = [node.name for node in graph.nodes]
    bounds = [0, *sorted(places), len(names)]
    if len(set(bounds)) < len(bounds):
        raise PartitionError("an empty stage", cuts=sorted(places), nodes=len(names))
    return Partition(tuple(tuple(names[low:high]) for low, high in pairwise(bounds)))
