"""Deferred groups: products of groups of rows with a matrix each, as of tokens with experts, put off."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from penstock.stages.deferral import Deferral
from penstock.stages.operands import can_be_put_off


def grouped_mm(deferral: Deferral, x: Tensor, weight: Tensor, *others: Any, **options: Any) -> Tensor | None:
    """The rows of x up to each of the offsets by the next matrix of the weight."""
    offsets = options.pop("offs", None)
    has_more = others or any(option is not None for option in options.values())
    if has_more or offsets is None or x.dim() != 2 or weight.dim() != 3 or not can_be_put_off(x, weight):
        return None
    result = functional.grouped_mm(x, weight.detach(), offs=offsets)
    compute = partial(_gradient if weight.is_contiguous() else _turned_gradient, offsets)
    return deferral.put_off(result, x, (weight,), compute)


def _gradient(offsets: Tensor, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    return (functional.grouped_mm(x.t(), gradient, offs=offsets),)


def _turned_gradient(offsets: Tensor, x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    return (functional.grouped_mm(gradient.t(), x, offs=offsets).transpose(-2, -1),)
