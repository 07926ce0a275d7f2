"""Refuses cuts that would change the results of the model."""

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor, nn

from penstock.capture import Recording, row_slices
from penstock.errors import PartitionError
from penstock.ir import Graph, Guard, Partition


def check_guards(recording: Recording, partition: Partition) -> None:
    """Raise a PartitionError if a branch of the model depends on values that no single stage has."""
    graph = recording.graph
    guards = [step for step in recording.record.steps if isinstance(step, Guard)]
    if partition.num_stages > 1:
        for guard in guards:
            # Every stage checks guards on state before the step, and a written buffer is up to date in one stage only.
            written = set(guard.arg_states) & graph.updated.keys()
            if written:
                raise PartitionError(
                    "control flow depends on a buffer that the model writes, and only one stage would have its content",
                    module=guard.scope or "the model",
                    read_by=guard.name,
                    buffers=sorted(written),
                    hint="keep the module that decides whole (basic_blocks)",
                )
    available = [recording.available_values(node.name for node in nodes) for nodes in partition.runs(graph)]
    for guard in guards:
        reads = set(guard.arg_values)
        if not any(reads <= values for values in available):
            raise PartitionError(
                "control flow depends on values of several stages",
                module=guard.scope or "the model",
                read_by=guard.name,
                values=sorted(reads),
                hint="cut elsewhere",
            )


def check_shared_memory(model: nn.Module, graph: Graph, partition: Partition) -> None:
    """Raise a PartitionError if a cut separates two tensors that overlap in memory and are trained or written.

    Each rank would change its own copy. A parameter with several names is not such a case: it is one tensor.
    """
    if partition.num_stages == 1:
        return
    users: dict[str, set[int]] = {}
    for node in graph.nodes:
        for name in map(graph.tensor_of, (*node.parameters, *node.buffers)):
            users.setdefault(name, set()).add(partition.stage_of(node.name))
    for first, second in _overlapping_state(model, graph):
        stages = users.get(first, set()) | users.get(second, set())
        if len(stages) > 1 and first in users and second in users:
            raise PartitionError(
                "two parameters or buffers share memory, and each stage would change its own copy",
                names=f"{first}, {second}",
                stages=sorted(stages),
                hint="use one parameter in both places (module.weight = other.weight), or keep them in one stage",
            )


def _overlapping_state(model: nn.Module, graph: Graph) -> Iterator[tuple[str, str]]:
    groups: dict[int, list[tuple[str, Tensor]]] = {}
    # Rows of a parameter share its memory, and their gradients are summed.
    rows = row_slices(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in rows:
            continue
        if not tensor.is_meta and tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
            groups.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for group in groups.values():
        for (first_name, first), (second_name, second) in combinations(group, 2):
            is_written = {first_name, second_name} & graph.updated.keys()
            if (first.requires_grad or second.requires_grad or is_written) and _share_elements(first, second):
                yield first_name, second_name


def _share_elements(first: Tensor, second: Tensor) -> bool:
    """Whether some element belongs to both tensors, which share a storage."""
    if first.dtype is not second.dtype:
        return True
    # Exact also for interleaved views, such as the even and the odd columns of a matrix.
    size = first.untyped_storage().nbytes() // first.element_size()
    is_occupied = torch.zeros(size, dtype=torch.bool)
    is_occupied.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return bool(is_occupied.as_strided(second.shape, second.stride(), second.storage_offset()).any())
