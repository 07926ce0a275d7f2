"""Sends nested structures of tensors from one rank to others: a JSON text of the structure, then the tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.capture import as_bytes, contiguous_entries, dtype_name, dtype_named
from penstock.errors import RunError
from penstock.ir import ITEM_BYTES
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.tensor_json import NamedTensors, decode_tree, encode_tree
from penstock.runtime.tensor_parallel import full_tensor


def flatten_structure(structure: Any) -> tuple[str, list[Tensor]]:
    """Return a JSON text of a structure that `check_structure` accepts, and its tensors in order."""
    tensors: NamedTensors = {}
    tree = encode_tree(structure, tensors, "batch")
    specs = {
        name: [dtype_name(tensor.dtype), list(tensor.shape), tensor.requires_grad] for name, tensor in tensors.items()
    }
    text = json.dumps({"tree": tree, "tensors": specs})
    return text, [contiguous_entries(tensor) for tensor in tensors.values()]


def check_structure(structure: Any, hint: str = "") -> None:
    """Raise a RunError if a structure has anything that would arrive as something else, such as a subclass of a list.

    `hint` is that of the error.
    """
    if isinstance(structure, Tensor):
        if (
            structure.layout is not torch.strided
            or dtype_name(structure.dtype) not in ITEM_BYTES
            or structure.is_quantized
        ):
            got = f"{structure.dtype}, {structure.layout}".replace("torch.", "")
            raise RunError("a tensor that is sent to other ranks must be strided and not quantized", got=got, hint=hint)
    elif type(structure) in (list, tuple):
        for item in structure:
            check_structure(item, hint)
    elif type(structure) is dict and all(type(key) is str for key in structure):
        for item in structure.values():
            check_structure(item, hint)
    elif structure is not None and type(structure) not in (bool, int, float, str):
        raise RunError(
            "values that are sent to other ranks must be tensors, lists, tuples, dicts, numbers, strings or None",
            got=type(structure).__name__,
            hint=hint,
        )


def read_structure(text: str, device: torch.device) -> tuple[Callable[[Sequence[Tensor]], Any], list[Tensor]]:
    """A function that builds the structure from its tensors, and buffers on the device to receive them into."""
    document = json.loads(text)
    specs: dict[str, Any] = document["tensors"]
    if unknown := [dtype for dtype, _, _ in specs.values() if dtype not in ITEM_BYTES]:
        raise RunError("a batch has a tensor of an unknown dtype", dtype=unknown[0])
    buffers = [torch.empty(shape, dtype=dtype_named(dtype), device=device) for dtype, shape, _ in specs.values()]

    def build(tensors: Sequence[Tensor]) -> Any:
        pairs = zip(specs.items(), tensors, strict=True)
        named = {name: tensor.requires_grad_() if spec[2] else tensor for (name, spec), tensor in pairs}
        return decode_tree(document["tree"], named.__getitem__)

    return build, buffers


def broadcast_structure(groups: ProcessGroups, structure: Any, source: int, device: torch.device) -> Any:
    """The structure of rank `source` on every rank of the pipeline; `structure` is used on the source only.

    All ranks must know beforehand that `check_structure` accepts it: an error here would leave the others waiting.
    """
    if groups.rank == source:
        text, tensors = flatten_structure(structure)
        groups.broadcast_text(text, source)
    else:
        build, tensors = read_structure(groups.broadcast_text("", source), device)
    for tensor in tensors:
        if tensor.numel():
            groups.run(dist.broadcast, as_bytes(tensor), group=groups.group, group_src=source, async_op=True)
    return structure if groups.rank == source else build(tensors)


def gather_tensors(
    groups: ProcessGroups, tensors: Mapping[str, Tensor], device: torch.device, everywhere: bool
) -> dict[str, Tensor]:
    """The named tensors of all ranks in host memory, on rank 0 or everywhere; other ranks get an empty dict.

    All of them must pass `check_structure`. Sharded tensors are gathered. If several ranks have a name, the tensor of
    the first of them is returned.
    """
    detached = {name: full_tensor(tensor).detach() for name, tensor in tensors.items()}
    if groups.is_local:
        return {name: tensor.cpu().clone() for name, tensor in detached.items()}
    gathered: dict[str, Tensor] = {}
    for source in range(groups.num_ranks):
        sent = broadcast_structure(groups, detached if groups.rank == source else {}, source, device)
        if everywhere or groups.rank == 0:
            gathered = {**{name: tensor.cpu().clone() for name, tensor in sent.items()}, **gathered}
    return gathered
