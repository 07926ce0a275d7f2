"""The costs of one rank if the layers of a model are split over tensor-parallel ranks.

A node with matrices, such as a block, is split: its seconds, its matrices and the activations inside it are divided by
the degree, and its collectives are added to forward and backward. Values between nodes stay whole, as in the runtime
(`runtime/tensor_parallel.py`). With sequence parallelism, as in Megatron, they are split too.
"""

from dataclasses import dataclass, replace
from typing import Any

from penstock.ir import (
    NODE_SECONDS,
    Graph,
    LinkSpeed,
    Node,
    NodeCost,
    TensorSpec,
    Value,
)
from penstock.planner.candidates import Measured

_MOST_COLLECTIVES = 2.0
"""all-reduces of a block in each direction: one for attention, one for the layers after it"""


@dataclass(frozen=True)
class TensorParallel:
    """How layers are split over ranks."""

    degrees: tuple[int, ...] = (1,)
    """the numbers of ranks to choose from"""
    sequence_parallel: bool = False
    """a rank has a part of every value between nodes: it keeps and sends that part only"""
    overlap_collectives: bool = False
    """collectives run beside the matrix products of their node: it takes the longer of both instead of their sum"""


def split_tensors(
    measured: Measured,
    degree: int,
    link: LinkSpeed | None,
    tensor_parallel: TensorParallel = TensorParallel(),
) -> Measured:
    """Returns graph and profile of one tensor-parallel rank; names of nodes and values stay.

    Each matrix of a node adds half an all-reduce of its outputs in each direction (a gather or a scatter), up to two.
    Without a link collectives take no time.

    With sequence parallelism nodes without matrices, such as norms, are divided too. A gather of inputs and a scatter
    of outputs move the bytes of the all-reduce; a backward gathers the inputs once more for the weight gradient. An
    output layer keeps its part of the logits and gathers its inputs. See Korthikanti et al., Reducing Activation
    Recomputation in Large Transformer Models, MLSys 2023, section 4.2.
    """
    if degree == 1:
        return measured
    graph, profile = measured
    matrices = {value.name for value in graph.parameters if _is_matrix(value.spec)}
    parameters = tuple(Value(each.name, _split(each.spec, degree)) for each in graph.parameters)
    split, held = replace(graph, parameters=parameters), profile.held
    if tensor_parallel.sequence_parallel:
        split = replace(split, nodes=tuple(_with_split_values(node, degree) for node in graph.nodes))
        is_split = {value.name for node in graph.nodes if not node.from_inputs for value in node.makes}
        held = tuple((name, size // degree if name in is_split else size) for name, size in held)
    costs = []
    for node in graph.nodes:
        cost = profile[node.name]
        count = len({graph.tensor_of(name) for name in node.parameters} & matrices)
        if not count and (node.from_inputs or not tensor_parallel.sequence_parallel):
            costs.append(cost)
            continue
        moved = (
            _gathered_bytes(graph, node)
            if tensor_parallel.sequence_parallel
            else sum(each.spec.bytes for each in node.makes)
        )
        reduction = 0.0 if link is None else link.ring_seconds(degree, moved)
        forward = min(count / 2, _MOST_COLLECTIVES) * reduction
        backward = (1.5 if tensor_parallel.sequence_parallel else 1.0) * forward
        costs.append(_split_cost(cost, degree, forward, backward, tensor_parallel.overlap_collectives))
    seconds = profile.step_seconds * sum(cost.seconds for cost in costs) / (profile.seconds or 1.0)
    changed = replace(profile, costs=tuple(costs), step_seconds=seconds, fingerprint=split.fingerprint, held=held)
    return Measured(split, changed)


def _is_matrix(spec: TensorSpec) -> bool:
    return len(spec.shape) > 1


def _split(spec: TensorSpec, degree: int) -> TensorSpec:
    """The spec of one rank's part of a matrix; a vector is replicated.

    It is split along the first dimension that is a multiple of `degree`, else along dimension 0, rounded up.
    """
    if not _is_matrix(spec):
        return spec
    divisible = [place for place, size in enumerate(spec.shape) if size % degree == 0]
    place = divisible[0] if divisible else 0
    shape = list(spec.shape)
    shape[place] = -(-shape[place] // degree)
    return replace(spec, shape=tuple(shape))


def _with_split_values(node: Node, degree: int) -> Node:
    """The node of one rank; values that depend on inputs only, such as a mask, are whole on every rank."""
    if node.from_inputs:
        return node
    return replace(node, makes=tuple(Value(each.name, _split(each.spec, degree)) for each in node.makes))


def _gathered_bytes(graph: Graph, node: Node) -> int:
    """Bytes of the activations that a node gathers or scatters: those it reads or those it makes, if they are fewer."""
    made = sum(value.spec.bytes for value in node.makes)
    read = sum(spec.bytes for spec in map(graph.spec, node.reads) if spec.is_floating_point)
    return min(made, read) if read else made


def _split_cost(cost: NodeCost, degree: int, forward: float, backward: float, overlaps: bool) -> NodeCost:
    """The cost of one rank; `forward` and `backward` are the seconds of its collectives."""

    def with_collectives(seconds: float, collectives: float) -> float:
        return max(seconds / degree, collectives) if overlaps else seconds / degree + collectives

    memory, saved = cost.memory, cost.saved
    if not cost.backward:
        backward = 0.0
    collectives = {
        "forward": forward,
        "backward": backward,
        # The first layer has no input gradient: its collectives are in the weight gradient.
        "input_grad" if cost.input_grad else "weight_grad": backward,
    }
    seconds: dict[str, Any] = {
        name: with_collectives(getattr(cost, name), collectives.get(name, 0.0)) for name in NODE_SECONDS
    }
    return replace(
        cost,
        **seconds,
        memory=replace(
            memory,
            kept=memory.kept // degree,
            kept_for_weight_grad=memory.kept_for_weight_grad // degree,
            parameters=memory.parameters // degree,
        ),
        saved=replace(saved, own=saved.own // degree, late_own=saved.late_own // degree),
        flops=cost.flops / degree,
    )
