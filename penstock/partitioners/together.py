"""together: the nodes that no cut may separate, because they write the same memory or because the user says so."""

from collections.abc import Sequence
from difflib import get_close_matches

from penstock.errors import PartitionError
from penstock.ir import Graph


def together(graph: Graph) -> list[list[int]]:
    """Groups of positions of nodes: those that share memory which is written, and those that share state which is.

    With the makers and writers of such memory go the nodes that read it before it is written for the last time.
    """
    if not graph.updates and not any(group.writers for group in graph.storage):
        return []
    position = {node.name: place for place, node in enumerate(graph.nodes)}
    groups = _writing(graph, position)
    groups += [[position[node.name] for node in nodes] for nodes in graph.updated.values()]
    return [sorted(set(group)) for group in groups if len(set(group)) > 1]


def _writing(graph: Graph, position: dict[str, int]) -> list[list[int]]:
    written = [group for group in graph.storage if group.writers]
    readers: dict[str, list[int]] = {value: [] for group in written for value in group.values}
    if readers:
        for place, node in enumerate(graph.nodes):
            for value in node.reads:
                if value in readers:
                    readers[value].append(place)
    groups = []
    for group in written:
        makers = [position[graph.makers[value].name] for value in group.values if value in graph.makers]
        writers = [position[writer] for writer in group.writers]
        read = [place for value in group.values for place in readers[value] if place <= max(writers)]
        groups.append([*makers, *writers, *read])
    return groups


def named(graph: Graph, groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """Groups given by names of nodes or of modules, as positions; a module stands for all of its nodes."""
    return [sorted({place for name in group for place in _places(graph, name)}) for group in groups]


def _places(graph: Graph, name: str) -> list[int]:
    found = [place for place, node in enumerate(graph.nodes) if node.name == name]
    if not found:
        inside = f"{name}."
        modules = [node.module for node in graph.nodes]
        found = [place for place, module in enumerate(modules) if module == name or module.startswith(inside)]
    if not found:
        known = sorted({node.name for node in graph.nodes} | {node.module for node in graph.nodes} - {""})
        close = get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]!r}" if close else ""
        raise PartitionError("no such node or module to keep together", name=repr(name), hint=hint)
    return found
