"""Wire: how one value travels between two ranks: its form is agreed before, and its layout in memory is kept."""

import math

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.ir import Value


class Wire:
    """One value of a message, or its gradient, prepared: what leaves is checked, as gloo would not notice.

    Dimensions are sent in the order in which they lie in memory, so that a channels-last value needs no copy and
    arrives as one. Complex numbers travel as pairs.
    """

    __slots__ = ("_back", "_dtype", "_order", "_shape", "_shipped", "_wants", "is_empty", "value")

    def __init__(self, value: Value, is_gradient: bool = False) -> None:
        self.value = value
        spec = value.spec
        self.is_empty = math.prod(spec.shape) == 0
        self._wants = spec.requires_grad and not is_gradient
        self._shape, self._dtype = torch.Size(spec.shape), getattr(torch, spec.dtype)
        self._order = spec.order or None
        self._shipped = [spec.shape[dim] for dim in self._order] if self._order else spec.shape
        self._back = [self._order.index(dim) for dim in range(len(self._order))] if self._order else None

    def pack(self, tensor: Tensor | None, device: torch.device) -> Tensor:
        """The tensor as it is sent; a gradient that nobody made is zero."""
        if tensor is None:
            tensor = torch.zeros(self._shape, dtype=self._dtype, device=device)
        elif tensor.shape != self._shape or tensor.dtype != self._dtype:
            raise self._otherwise(tensor)
        # What is kept until it has arrived must not keep the graph behind it.
        if tensor.requires_grad:
            tensor = tensor.detach()
        if self._order:
            tensor = tensor.permute(self._order)
        tensor = tensor.contiguous()
        return torch.view_as_real(tensor.resolve_conj()) if self._dtype.is_complex else tensor

    def buffer(self, device: torch.device) -> Tensor:
        """Memory for one arrival."""
        buffer = torch.empty(self._shipped, dtype=self._dtype, device=device)
        return torch.view_as_real(buffer) if self._dtype.is_complex else buffer

    def unpack(self, buffer: Tensor) -> Tensor:
        """The value in an arrived buffer, laid out as it was at the sender; it wants a gradient if it did there."""
        value = torch.view_as_complex(buffer) if self._dtype.is_complex else buffer
        if self._back:
            value = value.permute(self._back)
        return value.requires_grad_() if self._wants else value

    def _otherwise(self, tensor: Tensor) -> RunError:
        return RunError(
            "a value is not what the stages agreed on",
            value=self.value.name,
            agreed=self.value.spec,
            found=f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
            hint="a hook or a block returns another form than when the model was recorded",
        )
