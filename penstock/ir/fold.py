"""fold: a Profile over a Partition gives the StageCosts."""

from penstock.ir.costs import MessageCost, StageCosts, StateBytes
from penstock.ir.graph import Graph, Node
from penstock.ir.partition import Partition
from penstock.ir.profile import Profile


def fold(graph: Graph, profile: Profile, partition: Partition, optimizer_copies: int = 0) -> StageCosts:
    """Seconds and bytes of every stage for one microbatch.

    Nodes that several stages run again are paid by each of them. A tensor with several tied names is held once by a
    stage, and by every stage that uses it. `optimizer_copies` is how many figures the optimizer holds for each
    trainable one: 0 for plain SGD, 2 for Adam.
    """
    profile.check(graph)
    crossings = partition.crossings(graph)
    runs = partition.runs(graph)
    costs = [[profile[node.name] for node in nodes] for nodes in runs]
    received = [sum(c.forward_bytes for c in crossings if c.consumer == stage) for stage in range(partition.num_stages)]
    return StageCosts(
        forward=tuple(sum(cost.forward for cost in stage) for stage in costs),
        input_grad=tuple(sum(cost.input_grad for cost in stage) for stage in costs),
        weight_grad=tuple(sum(cost.weight_grad for cost in stage) for stage in costs),
        backward=tuple(sum(cost.backward for cost in stage) for stage in costs),
        activation_bytes=tuple(
            sum(cost.memory.kept for cost in stage) + extra for stage, extra in zip(costs, received, strict=True)
        ),
        weight_grad_bytes=tuple(
            sum(cost.memory.kept_for_weight_grad for cost in stage) + extra
            for stage, extra in zip(costs, received, strict=True)
        ),
        messages=tuple(MessageCost(c.producer, c.consumer, c.forward_bytes, c.backward_bytes) for c in crossings),
        state=tuple(_state(graph, nodes, optimizer_copies) for nodes in runs),
    )


def _state(graph: Graph, nodes: tuple[Node, ...], optimizer_copies: int) -> StateBytes:
    names = {graph.tensor_of(name) for node in nodes for name in (*node.parameters, *node.buffers)}
    held = [value.spec for value in (*graph.parameters, *graph.buffers) if value.name in names]
    trained = sum(spec.bytes for spec in held if spec.requires_grad)
    return StateBytes(sum(spec.bytes for spec in held), trained, trained * optimizer_copies)
