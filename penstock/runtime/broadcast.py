"""Sends nested structures of tensors from one rank to others: a text that describes the structure, then the tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import RunError
from penstock.ir import ITEM_BYTES
from penstock.runtime.groups import ProcessGroups

_REFUSED = "refused: "


def flatten_structure(thing: Any) -> tuple[str, list[Tensor]]:
    """A text that describes a structure of lists, tuples, dicts and plain values, and its tensors in order."""
    tensors: list[Tensor] = []

    def describe(node: Any) -> Any:
        if isinstance(node, Tensor):
            dtype = str(node.dtype).removeprefix("torch.")
            if node.layout is not torch.strided or dtype not in ITEM_BYTES or node.is_quantized:
                kind = f"{node.dtype}, {node.layout}".replace("torch.", "")
                raise RunError("a tensor of this kind cannot be sent to the other ranks", kind=kind)
            tensors.append(node)
            return {"tensor": [dtype, list(node.shape), node.requires_grad]}
        if type(node) in (list, tuple):
            return {type(node).__name__: [describe(item) for item in node]}
        if type(node) is dict and all(type(key) is str for key in node):
            return {"dict": {key: describe(item) for key, item in node.items()}}
        if node is None or type(node) in (bool, int, float, str):
            return {"plain": node}
        raise RunError(
            'with inputs="first" a batch must consist of tensors, lists, tuples, dicts, numbers, strings and None',
            found=type(node).__name__,
            hint='inputs="all", and the same batch on every rank',
        )

    text = json.dumps(describe(thing))
    return text, [tensor.detach().contiguous() for tensor in tensors]


def read_structure(text: str) -> tuple[Callable[[Sequence[Tensor]], Any], list[Tensor]]:
    """A function that builds the structure from its tensors, and buffers to receive them into."""
    root, buffers = json.loads(text), list[Tensor]()

    def allocate(node: Mapping[str, Any]) -> None:
        ((kind, content),) = node.items()
        if kind == "tensor":
            dtype, shape, _ = content
            if dtype not in ITEM_BYTES:
                raise RunError("a batch has a tensor of an unknown dtype", dtype=dtype)
            buffers.append(torch.empty(shape, dtype=getattr(torch, dtype)))
        elif kind != "plain":
            for item in content.values() if kind == "dict" else content:
                allocate(item)

    def build(node: Mapping[str, Any], tensors: Any) -> Any:
        ((kind, content),) = node.items()
        if kind == "tensor":
            tensor: Tensor = next(tensors)
            return tensor.requires_grad_() if content[2] else tensor
        if kind == "dict":
            return {key: build(item, tensors) for key, item in content.items()}
        if kind in ("list", "tuple"):
            items = [build(item, tensors) for item in content]
            return items if kind == "list" else tuple(items)
        return content

    allocate(root)
    return lambda tensors: build(root, iter(tensors)), buffers


def broadcast_structure(groups: ProcessGroups, thing: Any, source: int, device: torch.device) -> Any:
    """The structure of rank `source` on every rank of the pipeline; `thing` is used on the source only."""
    if groups.rank == source:
        try:
            text, tensors = flatten_structure(thing)
        except RunError as error:
            broadcast_refusal(groups, error, source)
            raise
        groups.broadcast_text(text, source)
    else:
        text = groups.broadcast_text("", source)
        if text.startswith(_REFUSED):
            raise RunError(text.removeprefix(_REFUSED), rank=source)
        build, buffers = read_structure(text)
        tensors = [buffer.to(device) for buffer in buffers]
    for tensor in tensors:
        if tensor.numel():
            # As bytes, which every backend can send, whatever the dtype.
            content = tensor.reshape(-1).view(torch.uint8)
            groups.run(dist.broadcast, content, group=groups.group, group_src=source, async_op=True)
    return thing if groups.rank == source else build(tensors)


def broadcast_refusal(groups: ProcessGroups, error: Exception, source: int) -> None:
    """On the source, instead of `broadcast_structure`: the other ranks raise this error."""
    groups.broadcast_text(f"{_REFUSED}{error.problem if isinstance(error, RunError) else error}", source)


def gather_tensors(
    groups: ProcessGroups, own: Mapping[str, Tensor], device: torch.device, everywhere: bool = False
) -> dict[str, Tensor]:
    """The named tensors of all ranks in host memory, on rank 0 or everywhere; other ranks get an empty dict.

    Sharded tensors are made whole. Of equal names the first rank's tensor is taken.
    """
    whole = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in own.items()}
    detached = {name: tensor.detach() for name, tensor in whole.items()}
    if groups.is_local:
        return {name: tensor.cpu().clone() for name, tensor in detached.items()}
    gathered: dict[str, Tensor] = {}
    for source in range(groups.num_ranks):
        part = broadcast_structure(groups, detached if groups.rank == source else {}, source, device)
        if everywhere or groups.rank == 0:
            gathered = {**{name: tensor.cpu().clone() for name, tensor in part.items()}, **gathered}
    return gathered
