"""Liveness: which values of a graph the loss depends on; only their gradients ever return."""

from collections.abc import Collection
from dataclasses import replace

from penstock.ir.graph import Graph, Value

ADDED_LOSS = "added_loss"
"""what the function is called by which a model adds to its loss"""


def prune_gradients(graph: Graph, roots: Collection[str], adding: Collection[str] = ()) -> Graph:
    """The same graph in which only those values need a gradient from which a root, or a node that adds, can be reached.

    `adding` are the nodes that add to the loss, whoever reads what they make. A node is taken to use everything that it
    reads. Values without a way to the loss keep their numbers, but a gradient of them would be a zero that plain
    training never makes.
    """
    live = set(roots)
    for node in reversed(graph.nodes):
        is_live = any(value.name in live and value.spec.requires_grad for value in node.makes)
        if is_live or node.name in adding:
            live.update(node.reads)
    nodes = (replace(node, makes=tuple(_kept(value, live) for value in node.makes)) for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _kept(value: Value, live: Collection[str]) -> Value:
    if value.name in live or not value.spec.requires_grad:
        return value
    return Value(value.name, replace(value.spec, requires_grad=False))
