"""Delivery: what only one rank has, a batch or an output, brought to the ranks that need it or parts of it.

A header says how it is built; it goes to all ranks. Tensors go to those ranks that want them.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import RunError
from penstock.ir import ITEM_BYTES
from penstock.runtime.groups import ProcessGroups

Places = Collection[int] | None
_REFUSED = "refused: "


def write_header(batch: Any) -> tuple[str, list[Tensor]]:
    """The structure of a batch as text, and its tensors in order."""
    tensors: list[Tensor] = []
    return json.dumps(_written(batch, tensors)), [tensor.detach().contiguous() for tensor in tensors]


def _written(thing: Any, tensors: list[Tensor]) -> Any:
    if isinstance(thing, Tensor):
        is_known = str(thing.dtype).removeprefix("torch.") in ITEM_BYTES and not thing.is_quantized
        if thing.layout is not torch.strided or not is_known:
            raise RunError("a tensor of this kind cannot be sent to the other ranks", kind=_kind(thing))
        tensors.append(thing)
        return {"tensor": [str(thing.dtype).removeprefix("torch."), list(thing.shape), thing.requires_grad]}
    if type(thing) in (list, tuple):
        return {type(thing).__name__: [_written(item, tensors) for item in thing]}
    if type(thing) is dict and all(type(key) is str for key in thing):
        return {"dict": {key: _written(item, tensors) for key, item in thing.items()}}
    if thing is None or type(thing) in (bool, int, float, str):
        return {"plain": thing}
    raise RunError(
        'with inputs="first" a batch is made of tensors, lists, tuples, dicts, numbers, texts and None',
        found=type(thing).__name__,
        hint='inputs="all", and the same batch on every rank',
    )


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")


def read_header(text: str) -> tuple[Callable[[Sequence[Tensor]], Any], list[Tensor]]:
    """How to build the batch from its tensors, and memory for them."""
    tree, buffers = json.loads(text), []

    def gather(node: Mapping[str, Any]) -> None:
        (word, content) = next(iter(node.items()))
        if word == "tensor":
            dtype, shape, _ = content
            if dtype not in ITEM_BYTES:
                raise RunError("a batch with a tensor of an unknown type", dtype=dtype)
            buffers.append(torch.empty(shape, dtype=getattr(torch, dtype)))
        elif word != "plain":
            for item in content.values() if word == "dict" else content:
                gather(item)

    gather(tree)
    return lambda tensors: _built(tree, iter(tensors)), buffers


def _built(node: Mapping[str, Any], tensors: Any) -> Any:
    word, content = next(iter(node.items()))
    if word == "tensor":
        tensor: Tensor = next(tensors)
        return tensor.requires_grad_() if content[2] else tensor
    if word == "dict":
        return {key: _built(item, tensors) for key, item in content.items()}
    if word in ("list", "tuple"):
        items = [_built(item, tensors) for item in content]
        return items if word == "list" else tuple(items)
    return content


class Delivery:
    """Carries the tensors of batches from pipeline rank 0 to the others."""

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        self._groups, self._device = groups, device

    def give(self, tensors: Sequence[Tensor], wanted: Callable[[int], Places]) -> None:
        """From rank 0: to each rank the tensors in the places that it wants; None: all of them."""
        works = [
            self._groups.start(dist.isend, tensors[place], group=self._groups.group, group_dst=rank)
            for rank in range(1, self._groups.num_ranks)
            for place in _places(tensors, wanted(rank))
        ]
        for work in works:
            self._groups.wait(work)

    def take(self, buffers: Sequence[Tensor], wanted: Places) -> list[Tensor]:
        """On the other ranks: the tensors; what is not wanted is memory without content."""
        own = [buffer.to(self._device) for buffer in buffers]
        group = self._groups.group
        places = _places(own, wanted)
        works = [self._groups.start(dist.irecv, own[place], group=group, group_src=0) for place in places]
        for work in works:
            self._groups.wait(work)
        return own


def share(groups: ProcessGroups, batch: Any, source: int, device: torch.device) -> Any:
    """What one rank has, on every rank; `batch` counts on the source only."""
    if groups.rank == source:
        tensors = _told(groups, batch, source)
    else:
        text = groups.broadcast_text("", source)
        if text.startswith(_REFUSED):
            raise RunError(text.removeprefix(_REFUSED), rank=source)
        build, buffers = read_header(text)
        tensors = [buffer.to(device) for buffer in buffers]
    for tensor in tensors:
        if tensor.numel():
            # As bytes, which every backend carries whatever the type.
            content = tensor.reshape(-1).view(torch.uint8)
            groups.run(dist.broadcast, content, group=groups.group, group_src=source, async_op=True)
    return batch if groups.rank == source else build(tensors)


def refuse(groups: ProcessGroups, error: Exception, source: int) -> None:
    """On the source, in the place of `share`: the others raise an error of these words."""
    groups.broadcast_text(f"{_REFUSED}{error.problem if isinstance(error, RunError) else error}", source)


def _told(groups: ProcessGroups, batch: Any, source: int) -> list[Tensor]:
    """Tell the others how the batch is built, or that it cannot be told; its tensors."""
    try:
        header, tensors = write_header(batch)
    except RunError as error:
        refuse(groups, error, source)
        raise
    groups.broadcast_text(header, source)
    return tensors


def _places(tensors: Sequence[Tensor], wanted: Places) -> list[int]:
    """Those that are sent: wanted and not empty."""
    return [place for place, tensor in enumerate(tensors) if tensor.numel() and (wanted is None or place in wanted)]
