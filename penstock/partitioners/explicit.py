"""explicit: the cuts that the user names, as lists of modules per stage or as modules before or after which to cut.

Choose it to reproduce a split made elsewhere, or to move a boundary by hand.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from penstock.errors import PartitionError
from penstock.ir import Graph, Node, Partition
from penstock.partitioners.contiguous import cut_at


def by_modules(graph: Graph, stages: Sequence[Sequence[str]]) -> Partition:
    """Each stage is given by the names of its modules; what happens between modules goes where its values are.

    A module that depends on inputs only may be named in several stages. Every module with parameters must be in one.
    """
    owner = _owners(graph, stages)
    placed: dict[str, int] = {}
    for node in graph.nodes:
        named = _named(node, owner)
        read = [placed[graph.makers[value].name] for value in node.reads if value in graph.makers]
        if named is None and node.parameters:
            raise PartitionError(
                "a module with parameters is in no stage",
                module=node.module or node.name,
                parameters=node.parameters[:3],
            )
        placed[node.name] = named if named is not None else max(read, default=0)
    return Partition(tuple(tuple(name for name, at in placed.items() if at == stage) for stage in range(len(stages))))


def cut_before(graph: Graph, modules: Sequence[str]) -> Partition:
    """A new stage begins with each of the modules."""
    _check_names(modules)
    return cut_at(graph, [_first_place(graph, module) for module in modules])


def cut_after(graph: Graph, modules: Sequence[str]) -> Partition:
    """A stage ends with each of the modules."""
    _check_names(modules)
    return cut_at(graph, [_last_place(graph, module) + 1 for module in modules])


def _check_names(modules: Any) -> None:
    is_list = isinstance(modules, Iterable) and not isinstance(modules, str)
    if not is_list or not all(isinstance(module, str) for module in modules):
        raise PartitionError("a list of names of modules is needed", given=repr(modules))


def _owners(graph: Graph, stages: Any) -> dict[str, int]:
    owner: dict[str, int] = {}
    if not isinstance(stages, Iterable) or isinstance(stages, str):
        raise PartitionError("a list of names of modules per stage is needed", given=repr(stages))
    for stage, modules in enumerate(stages):
        _check_names(modules)
        if not modules:
            raise PartitionError("an empty stage", stage=stage)
        for module in modules:
            nodes = [graph.nodes[place] for place in _places(graph, module)]
            if module in owner and not all(node.from_inputs for node in nodes):
                raise PartitionError("a module in two stages", module=repr(module), stages=(owner[module], stage))
            owner.setdefault(module, stage)
    return owner


def _named(node: Node, owner: dict[str, int]) -> int | None:
    """The stage of the innermost named module that the node is part of."""
    words = node.module.split(".")
    for length in range(len(words), 0, -1):
        if (name := ".".join(words[:length])) in owner:
            return owner[name]
    return None


def _first_place(graph: Graph, module: str) -> int:
    return _places(graph, module)[0]


def _last_place(graph: Graph, module: str) -> int:
    return _places(graph, module)[-1]


def _places(graph: Graph, module: str) -> list[int]:
    found = [
        place for place, node in enumerate(graph.nodes) if node.module == module or node.module.startswith(f"{module}.")
    ]
    if not found:
        names = {node.module for node in graph.nodes}
        close = get_close_matches(module, sorted(names), n=1)
        raise PartitionError("no such module", name=repr(module), hint=f"did you mean {close[0]!r}" if close else "")
    return found
