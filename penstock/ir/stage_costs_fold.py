"""fold: a Profile over a Partition gives the StageCosts."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.ir.costs import MessageCost, StageCosts, StateBytes
from penstock.ir.graph import Graph, Node
from penstock.ir.holding import StageBytes, blocks, stage_bytes
from penstock.ir.partition import Crossing, Partition
from penstock.ir.placement import Placement
from penstock.ir.profile import NodeCost, Profile


def compute_stage_costs(
    graph: Graph,
    profile: Profile,
    partition: Partition,
    optimizer_copies: int = 0,
    placement: Placement | None = None,
    recomputed: Collection[int] = (),
) -> StageCosts:
    """Seconds and bytes of every stage for one microbatch.

    Nodes that several stages run again are paid by each of them. A tensor with several tied names is held once by a
    stage, and by every stage that uses it. `optimizer_copies` is how many figures the optimizer holds for each
    trainable one: 0 for plain SGD, 2 for Adam. With a placement, memory that stages of one rank share counts once. The
    blocks of a stage that is `recomputed` run once more at the beginning of its backward.
    """
    profile.check(graph)
    crossings, runs = partition.crossings(graph), partition.runs(graph)
    held = stage_bytes(graph, profile, runs, crossings, placement, recomputed)
    costs = [[profile[node.name] for node in nodes] for nodes in runs]
    again = blocks(graph) if recomputed else frozenset()
    for stage in recomputed:
        costs[stage] = [_again(cost) if cost.node in again else cost for cost in costs[stage]]
    stages = [_stage(nodes, held[stage], stage, crossings) for stage, nodes in enumerate(costs)]
    return StageCosts(
        forward=tuple(stage.forward for stage in stages),
        input_grad=tuple(stage.input_grad for stage in stages),
        weight_grad=tuple(stage.weight_grad for stage in stages),
        backward=tuple(stage.backward for stage in stages),
        activation_bytes=tuple(stage.kept for stage in stages),
        weight_grad_bytes=tuple(stage.late for stage in stages),
        messages=tuple(MessageCost(c.producer, c.consumer, c.forward_bytes, c.backward_bytes) for c in crossings),
        state=tuple(_state(graph, nodes, optimizer_copies) for nodes in runs),
    )


def _again(cost: NodeCost) -> NodeCost:
    """The cost of a block that runs again before its backward."""
    return replace(cost, backward=cost.forward + cost.backward, input_grad=cost.forward + cost.input_grad)


class _Stage(NamedTuple):
    """Seconds and bytes of one stage."""

    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    kept: int
    late: int


def _stage(costs: Sequence[NodeCost], held: StageBytes, stage: int, crossings: Iterable[Crossing]) -> _Stage:
    """A stage that returns no gradient has nothing to do but weight gradients, and keeps everything until then."""
    forward, backward = sum(cost.forward for cost in costs), sum(cost.backward for cost in costs)
    if any(crossing.gradients for crossing in crossings if crossing.consumer == stage):
        input_grad, weight_grad = sum(cost.input_grad for cost in costs), sum(cost.weight_grad for cost in costs)
        return _Stage(forward, backward, input_grad, weight_grad, held.kept, held.late)
    given = sum(crossing.backward_bytes for crossing in crossings if crossing.producer == stage)
    return _Stage(forward, backward, 0.0, backward, held.kept, held.kept + given)


def _state(graph: Graph, nodes: tuple[Node, ...], optimizer_copies: int) -> StateBytes:
    names = {graph.tensor_of(name) for node in nodes for name in (*node.parameters, *node.buffers)}
    held = [value.spec for value in (*graph.parameters, *graph.buffers) if value.name in names]
    trained = sum(spec.bytes for spec in held if spec.requires_grad)
    return StateBytes(sum(spec.bytes for spec in held), trained, trained * optimizer_copies)
