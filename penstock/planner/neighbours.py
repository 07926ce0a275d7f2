"""Neighbours: the partitions that differ by one node next to a cut."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import PartitionError
from penstock.ir import Graph, Partition


class Neighbour(NamedTuple):
    """A partition in which one node has changed sides."""

    partition: Partition
    node: str
    source: int
    target: int


def neighbours(graph: Graph, partition: Partition) -> Iterator[Neighbour]:
    """Every lawful move of one node over the cut to the stage before or after its own.

    Nodes that depend on inputs only are run wherever they are needed, so that moving them means nothing.
    """
    order = {node.name: place for place, node in enumerate(graph.nodes)}
    free = {node.name for node in graph.nodes if node.from_inputs}
    for stage in range(partition.num_stages - 1):
        here = sorted((name for name in partition.stages[stage] if name not in free), key=order.__getitem__)
        there = sorted((name for name in partition.stages[stage + 1] if name not in free), key=order.__getitem__)
        yield from _moved(graph, partition, here[-1:], stage, stage + 1)
        yield from _moved(graph, partition, there[:1], stage + 1, stage)


def _moved(graph: Graph, partition: Partition, nodes: list[str], source: int, target: int) -> Iterator[Neighbour]:
    stages = [list(names) for names in partition.stages]
    for node in nodes:
        stages[source].remove(node)
        stages[target].append(node)
        try:
            found = Partition(tuple(map(tuple, stages)))
            found.check(graph)
        except PartitionError:
            continue
        yield Neighbour(found, node, source, target)
