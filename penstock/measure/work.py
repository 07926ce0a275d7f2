"""Counts the arithmetic and the memory traffic of operations, to estimate their time on a device."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from penstock.capture import DispatchMode, dtype_name, storage_id, tensors_in
from penstock.ir import DeviceSpeed
from penstock.measure.measured_model import storage_ids

_ATEN = torch.ops.aten
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ATTENTION = functional.scaled_dot_product_attention
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DIMENSIONS = 4


def _grouped_flops(x: Tensor, weight: Tensor, *others: Any, out_val: Tensor, **options: Any) -> int:
    """Each row by the matrix of its group, or all groups of rows by each other."""
    return 2 * x.numel() * weight.shape[-1]


FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    FLASH: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    FLASH_BACKWARD: flop_registry[_ATEN._scaled_dot_product_flash_attention_backward],
    _ATEN._grouped_mm: _grouped_flops,
}
"""the operations whose arithmetic counts, from torch's own flop counter; all others are bound by memory"""
_INDEXING = frozenset({_ATEN.embedding, _ATEN.index_select, _ATEN.gather, _ATEN.index})
"""these read only as much of their first tensor as they write"""
_ALLOCATING = frozenset({_ATEN.empty, _ATEN.empty_like, _ATEN.new_empty, _ATEN.empty_strided, _ATEN.new_empty_strided})
"""these only allocate"""


class WorkCounter(DispatchMode):
    """Adds up the seconds that a device of some speed would take for the operations inside."""

    def __init__(self, speed: DeviceSpeed) -> None:
        super().__init__()
        self.seconds_so_far, self.flops, self.bytes = 0.0, 0, 0
        self._speed = speed

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """The estimated seconds of a call, and its result."""
        before = self.seconds_so_far
        with self:
            result = call()
        return self.seconds_so_far - before, result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet, given, made = func._overloadpacket, tensors_in((args, kwargs)), tensors_in(result)
        # An operation that writes nothing and returns only views of its arguments costs nothing.
        is_view = bool(made) and storage_ids(given).issuperset(map(storage_id, made))
        if packet not in _ALLOCATING and (func._schema.is_mutable or not is_view):
            flops = FLOPS[packet](*args, **kwargs, out_val=result) if packet in FLOPS else 0
            read = [*given[1:], *made] if packet in _INDEXING and given else given
            moved = sum(map(_size, (*read, *made)))
            self.flops, self.bytes = self.flops + flops, self.bytes + moved
            dtype = dtype_name(given[0].dtype) if flops and given else ""
            self.seconds_so_far += self._speed.seconds(flops, moved, dtype)
        return result


def _size(tensor: Tensor) -> int:
    """Bytes of the elements; an element that an expanded tensor repeats counts once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in strides if stride or not size) * tensor.element_size()


# Attention on the meta device


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, scaled dot-product attention on the meta device is one operation, as on real devices.

    There torch decomposes it, with a matrix of all pairs of tokens that no fused kernel would keep.
    """
    # torch's own code, such as nn.MultiheadAttention, calls it where no mode sees it.
    functional.scaled_dot_product_attention = attention
    try:
        with _FusedAttention():
            yield
    finally:
        functional.scaled_dot_product_attention = _ATTENTION


class _FusedAttention(TorchFunctionMode):
    """Replaces calls of the original function by code that imported it."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return (attention if func is _ATTENTION else func)(*args, **(kwargs or {}))


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """torch's function; on the meta device one operation, if the arguments have the usual four dimensions."""
    named = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    query, key, value, mask = named["query"], named["key"], named["value"], named.get("attn_mask")
    has_form = query.dim() == key.dim() == value.dim() == _DIMENSIONS and key.shape[-1] == value.shape[-1]
    if not query.is_meta or not has_form or (mask is not None and mask.requires_grad):
        return _ATTENTION(*args, **kwargs)
    if mask is not None and (mask.dtype is not query.dtype or not mask.is_meta):
        mask = torch.empty(mask.shape, dtype=query.dtype, device="meta")
    return FLASH(query, key, value, 0.0, bool(named.get("is_causal")), attn_mask=mask)[0]
