"""Work: counts the arithmetic and the bytes of every operation that runs inside it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from penstock.ir import DeviceSpeed
from penstock.measure.fused import FLASH, FLASH_BACKWARD
from penstock.measure.ledger import address_of, addresses, tensors

_ATEN = torch.ops.aten


def _grouped_flops(x: Tensor, weight: Tensor, *others: Any, out_val: Tensor, **options: Any) -> int:
    """Every row of the one by the matrix of its group, or all groups of rows by each other."""
    return 2 * x.numel() * weight.shape[-1]


FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    FLASH: flop_registry[_ATEN._scaled_dot_product_flash_attention],
    FLASH_BACKWARD: flop_registry[_ATEN._scaled_dot_product_flash_attention_backward],
    _ATEN._grouped_mm: _grouped_flops,
}
"""the operations whose arithmetic counts, as torch's own counter has them; all others are as slow as memory"""
_PICKING = frozenset({_ATEN.embedding, _ATEN.index_select, _ATEN.gather, _ATEN.index})
"""these read no more of their first tensor than they write"""
_FREE = frozenset({_ATEN.empty, _ATEN.empty_like, _ATEN.new_empty, _ATEN.empty_strided, _ATEN.new_empty_strided})
"""these only take memory"""


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the seconds that a device of some speed would take for what runs inside."""

    def __init__(self, speed: DeviceSpeed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds_so_far, self.flops, self.bytes = 0.0, 0, 0
        self._speed = speed

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """The seconds of a call, and what it returns."""
        before = self.seconds_so_far
        with self:
            result = call()
        return self.seconds_so_far - before, result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet, given, made = func._overloadpacket, list(tensors((args, kwargs))), list(tensors(result))
        if packet not in _FREE and (func._schema.is_mutable or not _is_view(given, made)):
            flops = FLOPS[packet](*args, **kwargs, out_val=result) if packet in FLOPS else 0
            moved = _moved(packet, given, made)
            self.flops, self.bytes = self.flops + flops, self.bytes + moved
            self.seconds_so_far += self._speed.seconds(flops, moved)
        return result


def _is_view(given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether an operation that writes nothing only looks at what it was given in another way."""
    return bool(made) and addresses(given).issuperset(map(address_of, made))


def _moved(packet: Any, given: list[Tensor], made: list[Tensor]) -> int:
    """Bytes that an operation reads and writes."""
    read = [*given[1:], *made] if packet in _PICKING and given else given
    return sum(map(_size, (*read, *made)))


def _size(tensor: Tensor) -> int:
    """Bytes of the elements; one that stands for many, as in an expanded tensor, counts once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in strides if stride or not size) * tensor.element_size()
