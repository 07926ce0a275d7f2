"""Norms: the norm of all gradients of all ranks, computed without overflow, and clipping by it."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import RunError
from penstock.runtime.crew import Crew


def global_norm(crew: Crew, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm over the gradients of all ranks, the same on every one; float64 on the host.

    What is scaled by the largest entry cannot overflow, however large the entries are.
    """
    power = float(norm_type)
    if not power > 0:
        raise RunError("the type of a norm must be above 0, or inf", norm_type=norm_type)
    largest = _largest(crew.gather_everywhere(torch.stack([_largest(map(_highest, gradients))])).flatten())
    if math.isinf(power) or not bool(torch.isfinite(largest)) or float(largest) == 0.0:
        return largest
    # Replicas have the same gradients, unless these are sharded: then each has a part.
    parts = torch.zeros(2, dtype=torch.float64)
    for gradient in gradients:
        parts[int(isinstance(gradient, DTensor))] += _powers(gradient, float(largest), power)
    # Summed in the order of the ranks on every rank: the same number everywhere.
    total = crew.gather(parts)[:, 0].sum() + crew.gather_everywhere(parts)[:, 1].sum()
    return largest * total ** (1.0 / power)


def clip(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm so that it becomes at most `max_norm`."""
    factor = float(max_norm) / (float(norm) + 1e-6)
    if factor < 1.0 or math.isnan(factor):
        for gradient in gradients:
            gradient.mul_(factor)


def _highest(gradient: Tensor) -> Tensor:
    own = _local(gradient)
    if own.numel() == 0:
        return torch.zeros((), dtype=torch.float64)
    # On the host many times faster than the norm of this type.
    low, high = torch.aminmax(own.abs() if own.is_complex() else own)
    return torch.maximum(low.abs(), high.abs()).to("cpu", torch.float64)


def _largest(values: Iterable[Tensor] | Tensor) -> Tensor:
    """The maximum, NaN if one is NaN."""
    found = list(values)
    return torch.stack(found).max() if found else torch.zeros((), dtype=torch.float64)


def _powers(gradient: Tensor, largest: float, power: float) -> Tensor:
    scaled = _local(gradient).to(torch.float64).abs().div_(largest)
    return (scaled.square_() if power == 2.0 else scaled.pow_(power)).sum().cpu()


def _local(gradient: Tensor) -> Tensor:
    """This rank's part of a sharded gradient, or all of it."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
