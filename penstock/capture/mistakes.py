"""Mistakes: what is given to a capture and cannot be captured, told before anything runs."""

from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.capture.book import memory_of
from penstock.errors import CaptureError


def check_model(model: Any) -> None:
    """Refuse what is no module, and modules whose forward cannot be seen."""
    if not isinstance(model, nn.Module):
        raise CaptureError("only a torch.nn.Module can be captured", given=type(model).__name__)
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise CaptureError(
            "a model that is compiled as a whole cannot be seen into",
            given=type(model).__name__,
            hint="capture the model that was compiled (model._orig_mod), and compile its blocks",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            "a model that is scripted as a whole cannot be seen into",
            given=type(model).__name__,
            hint="capture the model before torch.jit.script; its blocks may be scripted",
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                "a parameter has no shape before the first forward",
                name=name,
                hint="call the model once on the batch, and then capture it",
            )


def check_batch(args: Any, kwargs: Any) -> None:
    """Refuse arguments that are no tuple and no dict."""
    if not isinstance(args, tuple | list):
        raise CaptureError(
            "args are the positional arguments of the model in a tuple",
            given=type(args).__name__,
            hint="capture(model, (batch,)), or capture(model, kwargs={...}) for arguments by name",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError("kwargs are the named arguments of the model in a dict", given=type(kwargs).__name__)


def check_granularity(depth: Any, basic_blocks: Any) -> None:
    """Refuse a depth that is no number, and blocks that are no list of names and classes."""
    if depth is not None and not (type(depth) is int and depth >= 1):
        raise CaptureError("depth must be 1 or more: the model itself is no part of it", depth=repr(depth))
    if isinstance(basic_blocks, str) or not isinstance(basic_blocks, Collection):
        raise CaptureError(
            "basic_blocks are names of modules or classes in a list",
            given=getattr(basic_blocks, "__name__", repr(basic_blocks)),
            hint="basic_blocks=[...]",
        )
    for block in basic_blocks:
        if not isinstance(block, str | type):
            raise CaptureError(
                "a basic block is the name of a module or a class",
                basic_block=repr(block).partition("\n")[0],
                hint="a name of named_modules(), or the class of the module",
            )


def check_mode() -> None:
    """Refuse to record where tensors do not tell whether they were written."""
    if torch.is_inference_mode_enabled():
        raise CaptureError("a model cannot be recorded in inference mode", hint="torch.no_grad()")


def check_apart(inputs: Mapping[str, Tensor], written: Collection[str]) -> None:
    """Refuse inputs that lie in the memory of one that the model writes into: each gets a copy of its own."""
    for one, other in combinations(inputs, 2):
        if (one in written or other in written) and _overlap(inputs[one], inputs[other]):
            raise CaptureError(
                "two inputs share memory, and the model writes into one of them",
                inputs=f"{one}, {other}",
                written=one if one in written else other,
                hint="give the model a copy (clone) of one of them",
            )


def _overlap(one: Tensor, other: Tensor) -> bool:
    if memory_of(one) != memory_of(other):
        return False
    (_, first_end), (second, _) = sorted(map(_extent, (one, other)))
    return second < first_end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its memory, and the one behind the last."""
    start = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = int(1 + sum((size - 1) * stride for size, stride in steps)) if tensor.numel() else 0
    return start * tensor.element_size(), (start + length) * tensor.element_size()
