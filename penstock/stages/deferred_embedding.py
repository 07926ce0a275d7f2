"""Deferred embedding: rows of a parameter by their numbers, with the gradient of the parameter put off."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.stages.deferral import Deferral
from penstock.stages.operands import can_be_put_off


def embedding(deferral: Deferral, rows: Tensor, weight: Tensor, **options: Any) -> Tensor | None:
    """The options are those of torch's function, which hands on all of them by name."""
    if options.get("sparse") or options.get("max_norm") is not None or not can_be_put_off(rows, weight):
        return None
    padding = options.get("padding_idx")
    padding = -1 if padding is None else padding % weight.shape[0]
    compute = partial(_gradient, weight.shape[0], padding, options.get("scale_grad_by_freq", False))
    return deferral.put_off(functional.embedding(rows, weight.detach(), **options), rows, (weight,), compute)


def _gradient(number: int, padding: int, is_scaled: bool, rows: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    return (torch.ops.aten.embedding_dense_backward(gradient, rows, number, padding, is_scaled),)
