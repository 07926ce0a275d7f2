"""The costs of one rank if the layers of a model are split over tensor-parallel ranks.

A node with matrices, such as a block, is split: its seconds, its matrices and the activations inside it are divided by
the degree, and its collectives are added to forward and backward. Values between nodes stay whole, as in the
runtime (`runtime/distributed_parameters.py`).
"""

from dataclasses import replace

from penstock.ir import LinkSpeed, NodeCost, TensorSpec, Value, ring_seconds
from penstock.planner.candidates import Measured

_MOST_COLLECTIVES = 2.0
"""all-reduces of a block in each direction: one for attention, one for the layers after it"""


def split_tensors(measured: Measured, degree: int, link: LinkSpeed | None) -> Measured:
    """Returns graph and profile of one tensor-parallel rank; names of nodes and values stay.

    Each matrix of a node adds half an all-reduce of its outputs in each direction (a gather or a scatter), up to two.
    Without a link collectives take no time.
    """
    if degree == 1:
        return measured
    graph, profile = measured
    matrices = {value.name for value in graph.parameters if _is_matrix(value.spec)}
    parameters = tuple(Value(each.name, _split(each.spec, degree)) for each in graph.parameters)
    split = replace(graph, parameters=parameters)
    costs = []
    for node in graph.nodes:
        cost = profile[node.name]
        count = len({graph.tensor_of(name) for name in node.parameters} & matrices)
        if not count:
            costs.append(cost)
            continue
        sent = sum(value.spec.bytes for value in node.makes)
        reduced = 0.0 if link is None else ring_seconds(degree, sent, link.latency, link.bandwidth)
        costs.append(_split_cost(cost, degree, min(count / 2, _MOST_COLLECTIVES) * reduced))
    seconds = profile.step_seconds * sum(c.forward + c.backward for c in costs) / (profile.seconds or 1.0)
    return Measured(split, replace(profile, costs=tuple(costs), step_seconds=seconds, fingerprint=split.fingerprint))


def _is_matrix(spec: TensorSpec) -> bool:
    return len(spec.shape) > 1


def _split(spec: TensorSpec, degree: int) -> TensorSpec:
    """A matrix split along its first dimension that divides; any other tensor is replicated."""
    if not _is_matrix(spec):
        return spec
    divisible = [place for place, size in enumerate(spec.shape) if size % degree == 0]
    place = divisible[0] if divisible else 0
    shape = list(spec.shape)
    shape[place] = -(-shape[place] // degree)
    return replace(spec, shape=tuple(shape))


def _split_cost(cost: NodeCost, degree: int, collectives: float) -> NodeCost:
    memory, saved = cost.memory, cost.saved
    has_backward = cost.backward > 0
    back = collectives if has_backward else 0.0
    return replace(
        cost,
        forward=cost.forward / degree + collectives,
        backward=cost.backward / degree + back,
        input_grad=cost.input_grad / degree + (back if cost.input_grad else 0.0),
        # The first layer has no input gradient: its collectives are in the weight gradient.
        weight_grad=cost.weight_grad / degree + (0.0 if cost.input_grad else back),
        memory=replace(
            memory,
            kept=memory.kept // degree,
            kept_for_weight_grad=memory.kept_for_weight_grad // degree,
            parameters=memory.parameters // degree,
        ),
        saved=replace(saved, own=saved.own // degree, late_own=saved.late_own // degree),
        flops=cost.flops / degree,
    )
