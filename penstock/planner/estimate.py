"""estimate: a Profile of a graph that nobody has measured, from the sizes of its parameters and values."""

import math

from penstock.ir.graph import Graph, Node
from penstock.ir.profile import NodeBytes, NodeCost, Profile

OPERATIONS_PER_SECOND = 5e10
BYTES_PER_SECOND = 1e10
_KEPT_PER_BLOCK = 8
"""Values of the size of its output that a block of several layers typically keeps for its backward."""


def estimate(graph: Graph) -> Profile:
    """Every parameter is taken to be used once per row of the output; a block keeps a few times what it makes."""
    shapes = {value.name: value.spec for value in (*graph.parameters, *graph.buffers)}
    costs = tuple(_cost(graph, node, shapes) for node in graph.nodes)
    seconds = math.fsum(cost.forward + cost.backward for cost in costs)
    return Profile(costs, seconds, graph.fingerprint, "estimated", ())


def _cost(graph: Graph, node: Node, shapes: dict) -> NodeCost:  # type: ignore[type-arg]
    made = sum(value.spec.bytes for value in node.makes)
    rows = max((math.prod(value.spec.shape[:-1]) for value in node.makes), default=1)
    tensors = {graph.tensor_of(name) for name in node.parameters}
    weights = sum(math.prod(shapes[name].shape) for name in tensors if len(shapes[name].shape) > 1)
    forward = 2 * weights * rows / OPERATIONS_PER_SECOND + made / BYTES_PER_SECOND
    trains = any(shapes[name].requires_grad for name in node.parameters)
    passes_on = any(value.spec.requires_grad for value in node.makes)
    kept = made * (_KEPT_PER_BLOCK if len(node.parameters) > 2 else 1) if passes_on else 0
    memory = NodeBytes(
        kept=kept,
        kept_for_weight_grad=kept if trains else 0,
        peak=kept + made,
        parameters=sum(shapes[name].bytes for name in node.parameters),
        buffers=sum(shapes[name].bytes for name in node.buffers),
        inputs=sum(graph.spec(value).bytes for value in node.reads),
        outputs=made,
    )
    input_grad, weight_grad = forward * passes_on, forward * trains
    return NodeCost(node.name, forward, input_grad + weight_grad, input_grad, weight_grad, memory)
