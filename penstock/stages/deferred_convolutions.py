"""Deferred convolutions: plain and transposed, in one to three dimensions, with the weight gradient put off."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.stages.deferral import Deferral, PutOff
from penstock.stages.operands import can_be_put_off, goes_along, lowered


class Plain(NamedTuple):
    """How a convolution moves over its input, in the order of torch's arguments."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1
    output_padding: Any = 0


class Transposed(NamedTuple):
    """How a transposed convolution moves over its output, in the order of torch's arguments."""

    stride: Any = 1
    padding: Any = 0
    output_padding: Any = 0
    groups: int = 1
    dilation: Any = 1


Geometry = Plain | Transposed


def convolution(call: Callable[..., Tensor], kind: type[Geometry]) -> PutOff:
    """The convolution `call`, put off."""

    def convolve(
        deferral: Deferral, x: Tensor, weight: Tensor, bias: Tensor | None = None, *moves: Any, **named: Any
    ) -> Tensor | None:
        # A single sample without a batch, padding to be found out, and a frozen weight are left alone.
        if x.dim() != weight.dim() or not can_be_put_off(x, weight):
            return None
        geometry = kind(*moves, **named)
        if isinstance(geometry.padding, str):
            return None
        x, own = lowered(x, weight.detach())
        has_bias = bias is not None and goes_along(bias)
        weights = (weight, bias) if bias is not None and has_bias else (weight,)
        added = bias.detach() if bias is not None and has_bias else bias
        compute = partial(_gradients, own, geometry, has_bias)
        return deferral.put_off(call(x, own, added, *moves, **named), x, weights, compute)

    return convolve


def _gradients(weight: Tensor, geometry: Geometry, has_bias: bool, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    sizes = weight.dim() - 2
    is_transposed = isinstance(geometry, Transposed)
    channels = gradient.shape[1:2]
    found = torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight,
        list(channels) if has_bias else None,
        _each(geometry.stride, sizes),
        _each(geometry.padding, sizes),
        _each(geometry.dilation, sizes),
        is_transposed,
        _each(geometry.output_padding, sizes),
        geometry.groups,
        [False, True, has_bias],
    )
    return tuple(each for each in found if each is not None)


def _each(sizes: Any, number: int) -> list[int]:
    """One number for all dimensions, or one for each."""
    numbers = [sizes] if isinstance(sizes, int) else list(sizes)
    return numbers * number if len(numbers) == 1 else numbers
