"""Memory: parameters and buffers that lie over one another, which a cut must not take apart."""

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.ir import Graph, Partition


def check_memory(model: nn.Module, graph: Graph, partition: Partition) -> None:
    """Refuse a cut between tensors of which one is trained or written, and the other changes with it.

    Each rank would have a copy of its own. A parameter with several names is no such case: it is one tensor.
    """
    if partition.num_stages == 1:
        return
    users: dict[str, set[int]] = {}
    for node in graph.nodes:
        for name in map(graph.tensor_of, (*node.parameters, *node.buffers)):
            users.setdefault(name, set()).add(partition.stage_of(node.name))
    for one, other in _overlapping(model, graph):
        stages = users.get(one, set()) | users.get(other, set())
        if len(stages) > 1 and one in users and other in users:
            raise PartitionError(
                "two parameters or buffers lie in one memory, and each stage would change its own copy",
                names=f"{one}, {other}",
                stages=sorted(stages),
                hint="use one parameter in both places (module.weight = other.weight), or keep them in one stage",
            )


def _overlapping(model: nn.Module, graph: Graph) -> Iterator[tuple[str, str]]:
    groups: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta and tensor.layout is torch.strided and type(tensor) in (Tensor, nn.Parameter):
            groups.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
    for group in groups.values():
        for (one, first), (other, second) in combinations(group, 2):
            is_changed = first.requires_grad or second.requires_grad or {one, other} & graph.updated.keys()
            if is_changed and _overlap(first, second):
                yield one, other


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether some number belongs to both."""
    if one.dtype is not other.dtype:
        return True
    size = one.untyped_storage().nbytes() // one.element_size()
    taken = torch.zeros(size, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())
