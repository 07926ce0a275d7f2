"""Hands: what the caller's functions do with the microbatches of one call, from the forward to the backward of each."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.capture import spec_of
from penstock.errors import RunError
from penstock.ir import TensorSpec
from penstock.stages import grad_boundary

ForwardFn = Callable[[Any], Any]
BackwardFn = Callable[[Any, Any], object]


class Functions(NamedTuple):
    """What a stage does, as its caller wrote it."""

    forward: ForwardFn
    backward: BackwardFn | None
    dtype: torch.dtype | None
    """what floating values that cross are expected to be"""


class _Kept(NamedTuple):
    """A microbatch between its forward and its backward."""

    output: Any
    specs: tuple[TensorSpec, ...]
    """those of the values that came and want a gradient"""
    device: torch.device
    returned: dict[str, Tensor | None]


class Hands:
    """Runs forwards and backwards; `results` holds what the forwards of the last stage returned."""

    def __init__(self, functions: Functions, extras: Sequence[Sequence[Tensor]], is_last: bool) -> None:
        self._functions, self._extras, self._is_last = functions, extras, is_last
        self._kept: dict[int, _Kept] = {}
        self.results: dict[int, Any] = {}

    def forward(self, microbatch: int, came: Sequence[Tensor], is_training: bool) -> list[Tensor]:
        """Run the caller's forward on what came and on the extra inputs; the values for the next stage."""
        returned: dict[str, Tensor | None] = {}
        entered = grad_boundary({str(place): value for place, value in enumerate(came)}, (), returned)
        inputs = [*entered.values(), *self._extras[microbatch]]
        with torch.set_grad_enabled(is_training):
            output = self._functions.forward(inputs[0] if len(inputs) == 1 else inputs)
        values = [] if self._is_last else self._crossing(output)
        if self._is_last:
            self.results[microbatch] = _detached(output)
        if is_training:
            specs = tuple(spec_of(value) for value in came if value.requires_grad)
            self._kept[microbatch] = _Kept(output, specs, inputs[0].device, returned)
        return values

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run the backward of a microbatch; the gradients for the stage before, for each value that wants one."""
        output, specs, device, returned = self._kept.pop(microbatch)
        if self._is_last:
            self._start(output)
        else:
            self._go_on(output, gradients)
        found = list(returned.values())
        return [_zeros(spec, device) if value is None else value for value, spec in zip(found, specs, strict=True)]

    def _start(self, output: Any) -> None:
        """From the loss."""
        if self._functions.backward is not None:
            self._functions.backward(output, None)
        elif isinstance(output, Tensor) and output.numel() == 1 and output.requires_grad:
            output.backward()  # type: ignore[no-untyped-call]
        else:
            raise RunError(
                "the forward of the last stage must return its loss, a single number with a gradient",
                found=spec_of(output) if isinstance(output, Tensor) else type(output).__name__,
                hint="a bwd_fn of your own, or forward_only=True",
            )

    def _go_on(self, output: Any, gradients: Sequence[Tensor]) -> None:
        """From the gradients that the next stage sent for those values that want one."""
        values = _tensors(output)
        left = iter(gradients)
        matched = [next(left) if value.requires_grad else None for value in values]
        if self._functions.backward is not None:
            self._functions.backward(output, matched[0] if isinstance(output, Tensor) else tuple(matched))
        elif gradients:
            torch.autograd.backward([value for value in values if value.requires_grad], list(gradients))

    def _crossing(self, output: Any) -> list[Tensor]:
        values = _tensors(output)
        expected = self._functions.dtype
        found = {value.dtype for value in values if value.is_floating_point()}
        if expected is not None and found - {expected}:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found - {expected}))
            said = f"values cross to the next stage as {names}, not as {expected}: dtype converts nothing"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return values


def _tensors(output: Any) -> list[Tensor]:
    """The values that a stage hands on."""
    values = [output] if isinstance(output, Tensor) else output
    if not isinstance(values, list | tuple) or not values or not all(isinstance(value, Tensor) for value in values):
        raise RunError(
            "a stage hands on a tensor, or a list or tuple of tensors",
            found=type(output).__name__,
            hint="return what the next stage needs; the last stage may return anything",
        )
    return list(values)


def _detached(output: Any) -> Any:
    """Without the graph behind it."""
    if isinstance(output, Tensor):
        return output.detach()
    return type(output)(map(_detached, output)) if type(output) in (list, tuple) else output


def _zeros(spec: TensorSpec, device: torch.device) -> Tensor:
    """The gradient of a value that had no part in the loss."""
    return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
