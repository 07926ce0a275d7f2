"""Cuts where the user says: by the modules of every stage, or by the modules to cut before.

Choose them to reproduce a split made elsewhere, or to move a boundary by hand.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from penstock.errors import PartitionError
from penstock.ir import Graph, Partition
from penstock.partitioners.atoms import inseparable_nodes, places_of_module


def by_modules(graph: Graph, stages: Sequence[Sequence[str]]) -> Partition:
    """Returns the partition for lists of module names per stage; operations between modules follow their inputs.

    A module that depends on inputs only may be named in several stages. Every module with parameters must be in one.
    """
    owner = _owners(graph, stages)
    placed: dict[str, int] = {}
    for node in graph.nodes:
        # The innermost named module that the node is part of.
        words = node.module.split(".")
        prefixes = (".".join(words[:length]) for length in range(len(words), 0, -1))
        stage = next((owner[name] for name in prefixes if name in owner), None)
        if stage is None and node.parameters:
            raise PartitionError(
                "every module with parameters must be in a stage",
                module=node.module or node.name,
                parameters=node.parameters[:3],
            )
        read = [placed[graph.makers[value].name] for value in node.reads if value in graph.makers]
        placed[node.name] = stage if stage is not None else max(read, default=0)
    return Partition(tuple(tuple(name for name, at in placed.items() if at == stage) for stage in range(len(stages))))


def cut_before(graph: Graph, modules: Sequence[str]) -> Partition:
    """Returns the partition in which a new stage begins with each of the modules."""
    _check_names(modules)
    return cut_at(graph, [places_of_module(graph, module)[0] for module in modules])


def cut_places(graph: Graph) -> list[int]:
    """Returns the places between nodes, counted from 1, where cutting separates no nodes that must stay together."""
    closed = [False] * (len(graph.nodes) + 1)
    for group in inseparable_nodes(graph):
        for place in range(group[0] + 1, group[-1] + 1):
            closed[place] = True
    return [place for place in range(1, len(graph.nodes)) if not closed[place]]


def cut_at(graph: Graph, places: list[int]) -> Partition:
    """Returns the partition with a cut before the node of each place."""
    names = [node.name for node in graph.nodes]
    boundaries = [0, *sorted(places), len(names)]
    if len(set(boundaries)) < len(boundaries):
        raise PartitionError("every stage must have a node", cuts=sorted(places), nodes=len(names))
    return Partition(tuple(tuple(names[low:high]) for low, high in pairwise(boundaries)))


def _check_names(modules: Any) -> None:
    is_list = isinstance(modules, Iterable) and not isinstance(modules, str)
    if not is_list or not all(isinstance(module, str) for module in modules):
        raise PartitionError("modules must be a list of module names", got=repr(modules))


def _owners(graph: Graph, stages: Any) -> dict[str, int]:
    """The stage of each named module; of one that depends on inputs only, the first that names it."""
    owner: dict[str, int] = {}
    if not isinstance(stages, Iterable) or isinstance(stages, str):
        raise PartitionError("stages must be lists of module names", got=repr(stages))
    for stage, modules in enumerate(stages):
        _check_names(modules)
        if not modules:
            raise PartitionError("every stage must have a node", stage=stage)
        for module in modules:
            nodes = [graph.nodes[place] for place in places_of_module(graph, module)]
            if module in owner and not all(node.from_inputs for node in nodes):
                raise PartitionError(
                    "a module must be in one stage only", module=repr(module), stages=(owner[module], stage)
                )
            owner.setdefault(module, stage)
    return owner
