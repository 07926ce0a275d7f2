"""Deferred products: linear, matmul, mm and addmm by a parameter, with the weight gradient put off."""

from collections.abc import Callable

import torch
from torch import Tensor, mm
from torch.nn import functional

from penstock.stages.deferral import Deferral
from penstock.stages.deferred import Compute
from penstock.stages.operands import can_be_put_off, goes_along, lowered

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear(deferral: Deferral, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x W^T + b."""
    # A weight that lies otherwise in memory is multiplied otherwise by torch, too.
    if weight.dim() != 2 or not weight.is_contiguous() or not can_be_put_off(x, weight):
        return None
    # As torch does it: in one with the bias where the values lie as one matrix, else the bias is added at the end.
    if bias is None or x.dim() == 2 or (x.dim() == 3 and x.is_contiguous()):
        return _product(deferral, functional.linear, x, weight, bias)
    result = _product(deferral, functional.linear, x, weight, None)
    return result + bias.to(result.dtype)


def addmm(deferral: Deferral, bias: Tensor, *factors: Tensor, **named: object) -> Tensor | None:
    """b + x W; with scales, or into a given tensor, it is left alone."""
    if named or len(factors) != 2 or not _is_matrix(factors[1]) or not can_be_put_off(factors[0], factors[1]):
        return None
    return _product(deferral, _addmm, factors[0], factors[1], bias)


def matmul(deferral: Deferral, x: Tensor, *factors: Tensor, **named: object) -> Tensor | None:
    """x W; into a given tensor, it is left alone."""
    if named or not _is_matrix(factors[0]) or not can_be_put_off(x, factors[0]):
        return None
    return _product(deferral, _mm, x, factors[0], None)


def _product(deferral: Deferral, call: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    way = 0 if call is functional.linear else 1 if weight.is_contiguous() else 2
    x, own = lowered(x, weight.detach())
    rows = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)
    if bias is not None and goes_along(bias):
        result = deferral.put_off(call(rows, own, bias.detach()), rows, (weight, bias), _WITH_BIAS[way])
    else:
        result = deferral.put_off(call(rows, own, bias), rows, (weight,), _ALONE[way])
    return result if rows is x else result.view(*x.shape[:-1], result.shape[-1])


def _is_matrix(weight: object) -> bool:
    """Row by row in memory, or column by column as one that is turned."""
    return isinstance(weight, Tensor) and weight.dim() == 2 and (weight.is_contiguous() or weight.t().is_contiguous())


def _mm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return mm(x, weight)


def _addmm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.addmm(bias, x, weight)  # type: ignore[arg-type]


_ALONE: tuple[Compute, ...] = (
    lambda x, gradient: (mm(gradient.t(), x),),
    lambda x, gradient: (mm(x.t(), gradient),),
    lambda x, gradient: (mm(gradient.t(), x).t(),),
)
"""the gradient of the weight of a linear, of a factor, and of a factor that is turned"""
_WITH_BIAS: tuple[Compute, ...] = (
    lambda x, gradient: (mm(gradient.t(), x), gradient.sum(0)),
    lambda x, gradient: (mm(x.t(), gradient), gradient.sum(0)),
    lambda x, gradient: (mm(gradient.t(), x).t(), gradient.sum(0)),
)
