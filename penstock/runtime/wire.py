"""Wire: how one value travels between two ranks: its form is agreed before, and its layout in memory is kept."""

import math

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.ir.graph import Value


class Wire:
    """One value of a message, prepared: what leaves is checked against what was agreed, gloo would not notice.

    Dimensions are sent in the order in which they lie in memory, so that a channels-last value needs no copy and
    arrives as one.
    """

    __slots__ = ("_back", "_dtype", "_order", "_shape", "_shipped", "is_empty", "requires_grad", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        spec = value.spec
        self.requires_grad = spec.requires_grad
        self.is_empty = math.prod(spec.shape) == 0
        self._shape, self._dtype = torch.Size(spec.shape), getattr(torch, spec.dtype)
        self._order = spec.order or None
        self._shipped = [spec.shape[dim] for dim in self._order] if self._order else spec.shape
        self._back = [self._order.index(dim) for dim in range(len(self._order))] if self._order else None

    def pack(self, tensor: Tensor | None, device: torch.device) -> Tensor:
        """The tensor as it is sent; a gradient that nobody made is zero."""
        if tensor is None:
            return torch.zeros(self._shipped, dtype=self._dtype, device=device)
        if tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise RunError(
                "a value is not what the stages agreed on",
                value=self.value.name,
                agreed=self.value.spec,
                found=f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
                hint="a hook or a block returns another form than when the model was recorded",
            )
        tensor = tensor.detach()
        return (tensor.permute(self._order) if self._order else tensor).contiguous()

    def buffer(self, device: torch.device) -> Tensor:
        """Memory for one arrival."""
        return torch.empty(self._shipped, dtype=self._dtype, device=device)

    def unpack(self, buffer: Tensor) -> Tensor:
        """The value in an arrived buffer, laid out as it was at the sender."""
        return buffer.permute(self._back) if self._back else buffer
