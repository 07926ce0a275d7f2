"""Chains of layers with made-up costs."""

from collections.abc import Sequence

from penstock.ir import Graph, Node, NodeBytes, NodeCost, Profile, TensorSpec, Value
from penstock.planner import Measured

SPEC = TensorSpec((4, 8), requires_grad=True)
WEIGHT = TensorSpec((8, 8), requires_grad=True)
KEPT = 1000


def chain(layers: int) -> Graph:
    """Each layer reads the one before it."""
    names = [f"layers.{index}" for index in range(layers)]
    reads = ["x", *names]
    return Graph(
        nodes=tuple(
            Node(name, (read,), (Value(name, SPEC),), (f"{name}.weight",), module=name, kind="Linear", is_block=True)
            for name, read in zip(names, reads, strict=False)
        ),
        inputs=(Value("x", TensorSpec((4, 8))),),
        outputs=(names[-1],),
        parameters=tuple(Value(f"{name}.weight", WEIGHT) for name in names),
    )


def measured(seconds: Sequence[float]) -> Measured:
    """Layers whose forward, input gradient and weight gradient take so long each, and which keep `KEPT` bytes."""
    graph = chain(len(seconds))
    memory = NodeBytes(kept=KEPT, kept_for_weight_grad=KEPT // 2)
    costs = [
        NodeCost(node.name, each, 2 * each, each, each, memory) for node, each in zip(graph.nodes, seconds, strict=True)
    ]
    return Measured(graph, Profile(tuple(costs), 3 * sum(seconds), graph.fingerprint, "made up"))
