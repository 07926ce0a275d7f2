"""Which outputs of a recorded forward pass a gradient back to each of its values."""

from collections.abc import Iterable, Mapping
from typing import Any

Edge = tuple[Any, int]
"""where a tensor is in autograd's graph: the node that made it, and the number of the tensor among its results"""


def outputs_with_gradient(edges: Mapping[str, Edge], outputs: Iterable[str]) -> dict[str, frozenset[str]]:
    """For every value, the outputs from which a path of autograd's graph leads back to it.

    `edges` has the values that require a gradient. A loss of other outputs leaves no gradient in a value, not even
    zeros.
    """
    names = [name for name in dict.fromkeys(outputs) if name in edges]
    # A set of outputs is a number with one bit for each, so that one pass over the graph finds all paths.
    reached: dict[Edge, int] = {}
    by_node: dict[Any, int] = {}
    for index, name in enumerate(names):
        node, number = edges[name]
        reached[node, number] = reached.get((node, number), 0) | 1 << index
        by_node[node] = by_node.get(node, 0) | 1 << index
    for node in _before_their_inputs(by_node):
        bits = by_node[node]
        for following, number in node.next_functions:
            if following is not None:
                reached[following, number] = reached.get((following, number), 0) | bits
                by_node[following] = by_node.get(following, 0) | bits
    sets: dict[int, frozenset[str]] = {}
    for bits in {reached.get(edge, 0) for edge in edges.values()}:
        sets[bits] = frozenset(name for index, name in enumerate(names) if bits >> index & 1)
    return {name: sets[reached.get(edge, 0)] for name, edge in edges.items()}


def _before_their_inputs(roots: Iterable[Any]) -> list[Any]:
    """All nodes of the graph in the order of backward: each after all nodes that pass it a gradient."""
    finished: list[Any] = []
    seen: set[Any] = set()
    for root in roots:
        # Without recursion: the graph may be deeper than Python's stack.
        stack = [(root, False)]
        while stack:
            node, is_left = stack.pop()
            if is_left:
                finished.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += ((following, False) for following, _ in node.next_functions if following is not None)
    return finished[::-1]
