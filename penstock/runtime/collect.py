"""Collect: named tensors of all ranks, brought together on one of them or on all."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from penstock.runtime.crew import Crew
from penstock.runtime.delivery import read_header, write_header


def collect(crew: Crew, own: Mapping[str, Tensor], everywhere: bool = False) -> dict[str, Tensor]:
    """The tensors of all ranks by name, in host memory, on rank 0 or everywhere; of equal names the first counts.

    Ranks that are not to have them return an empty dict.
    """
    found = {name: tensor.detach().cpu().clone() for name, tensor in own.items()}
    if crew.is_alone:
        return found
    collected: dict[str, Tensor] = {}
    for source in range(crew.ranks):
        part = _shared(crew, found if crew.rank == source else {}, source)
        if everywhere or crew.rank == 0:
            collected = {**part, **collected}
    return collected


def _shared(crew: Crew, part: dict[str, Tensor], source: int) -> dict[str, Tensor]:
    header, tensors = write_header(part) if crew.rank == source else ("", [])
    build, buffers = read_header(crew.tell_text(header, source))
    filled = tensors if crew.rank == source else buffers
    for tensor in filled:
        if tensor.numel():
            crew.wait(dist.broadcast(tensor, group=crew.control, group_src=source, async_op=True))
    return dict(build(filled))
