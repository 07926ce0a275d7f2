"""Collect: named tensors of all ranks, brought together on one of them or on all."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.runtime.delivery import share
from penstock.runtime.groups import ProcessGroups


def collect(
    groups: ProcessGroups, own: Mapping[str, Tensor], device: torch.device, everywhere: bool = False
) -> dict[str, Tensor]:
    """The tensors of all ranks by name, in host memory, on rank 0 or everywhere; of equal names the first counts.

    Ranks that are not to have them return an empty dict. What is sharded is made whole.
    """
    found = {name: _whole(tensor) for name, tensor in own.items()}
    if groups.is_local:
        return {name: _home(tensor) for name, tensor in found.items()}
    collected: dict[str, Tensor] = {}
    for source in range(groups.num_ranks):
        part = share(groups, found if groups.rank == source else {}, source, device)
        if everywhere or groups.rank == 0:
            collected = {**{name: _home(tensor) for name, tensor in part.items()}, **collected}
    return collected


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _home(tensor: Tensor) -> Tensor:
    return tensor.cpu().clone()
