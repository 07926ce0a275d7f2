"""Fused: attention of a model without numbers as the one operation that real devices have for it.

On the meta device torch spells attention out, with a matrix of all pairs of tokens that no device would keep.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_ATTENTION = functional.scaled_dot_product_attention
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DIMENSIONS = 4


@contextmanager
def fused_attention() -> Iterator[None]:
    """Inside, attention on the meta device is one operation; with the form of its result all is said."""
    # Torch's own functions, as that of nn.MultiheadAttention, call it by name out of sight of any mode.
    functional.scaled_dot_product_attention = attention
    try:
        with _Fused():
            yield
    finally:
        functional.scaled_dot_product_attention = _ATTENTION


class _Fused(TorchFunctionMode):
    """Sees the calls of those who hold the function itself."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return (attention if func is _ATTENTION else func)(*args, **(kwargs or {}))


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """What torch's function returns; on the meta device by one operation, if the arguments have the usual form."""
    named = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    query, key, value, mask = named["query"], named["key"], named["value"], named.get("attn_mask")
    has_form = query.dim() == key.dim() == value.dim() == _DIMENSIONS and key.shape[-1] == value.shape[-1]
    if not query.is_meta or not has_form or (mask is not None and mask.requires_grad):
        return _ATTENTION(*args, **kwargs)
    if mask is not None and (mask.dtype is not query.dtype or not mask.is_meta):
        mask = torch.empty(mask.shape, dtype=query.dtype, device="meta")
    result: Tensor = FLASH(query, key, value, 0.0, bool(named.get("is_causal")), attn_mask=mask)[0]
    return result
