"""Spreading: what the nodes of a plan cost, told from its stages where the profile is gone.

The seconds of a stage are spread over its nodes by the work that the graph lets expect of each: the elements that it
makes, times the inputs that its matrices take for one of them. Stages cost what they cost in the plan; inside a stage
it is an estimate.
"""

import math

from penstock.ir import Graph, Node, NodeBytes, NodeCost, Plan, Profile, StageCosts, TensorSpec

_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def spread(plan: Plan, costs: StageCosts) -> Profile:
    """The profile of the plan's graph, from what its stages cost."""
    found: dict[str, NodeCost] = {}
    for stage, names in enumerate(plan.partition.stages):
        for name, share in _shares(plan.graph, names).items():
            found[name] = _cost(costs, stage, name, share)
    nodes = tuple(found[node.name] for node in plan.graph.nodes)
    seconds = math.fsum(cost.forward + cost.backward for cost in nodes)
    return Profile(nodes, seconds, plan.graph.fingerprint, "told from the stages of a plan")


def _shares(graph: Graph, names: tuple[str, ...]) -> dict[str, float]:
    """What each node does of its stage; those from inputs run wherever they are read, and cost little."""
    work = {name: 0.0 if graph[name].from_inputs else _work(graph, graph[name]) for name in names}
    total = math.fsum(work.values())
    return {name: each / total if total else 1 / len(names) for name, each in work.items()}


def _work(graph: Graph, node: Node) -> float:
    made = max((math.prod(value.spec.shape) for value in node.makes), default=0)
    # What reads whole numbers looks rows of its matrix up.
    if any(graph.spec(name).dtype in _INTEGERS for name in node.reads):
        return float(made)
    specs = {value.name: value.spec for value in graph.parameters}
    return float(made * (1 + sum(_inputs(specs[name]) for name in node.parameters if name in specs)))


def _inputs(spec: TensorSpec) -> int:
    return math.prod(spec.shape[1:]) if len(spec.shape) > 1 else 0


def _cost(costs: StageCosts, stage: int, name: str, share: float) -> NodeCost:
    input_grad, weight_grad = costs.input_grad[stage], costs.weight_grad[stage]
    if not input_grad:
        # The first stage returns no gradient; its nodes would elsewhere.
        input_grad = weight_grad = costs.backward[stage] / 2
    kept = NodeBytes(int(share * costs.activation_bytes[stage]), int(share * costs.weight_grad_bytes[stage]))
    return NodeCost(
        name, share * costs.forward[stage], share * costs.backward[stage], share * input_grad, share * weight_grad, kept
    )
