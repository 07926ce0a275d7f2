"""Norms: the norm of all gradients of all ranks, computed without overflow, and clipping by it."""

import math
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import RunError
from penstock.runtime.sync import RankSync, SyncRequest, SyncVote


def check_clipping(max_norm: object, norm_type: object) -> tuple[float, float]:
    """The limit and the type of a norm as numbers; refused if they cannot be."""
    limit = _number(max_norm)
    if limit is None or not limit >= 0:
        raise RunError("max_norm is a number of 0 or more", given=repr(max_norm), hint="clip_grad_norm_(1.0)")
    power = _number(norm_type)
    if power is None or not power > 0:
        raise RunError(
            "the type of a norm is a number above 0, or inf",
            norm_type=repr(norm_type),
            hint='2.0 for the usual norm, float("inf") for the largest entry',
        )
    return limit, power


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    if isinstance(value, str):
        # As in torch, which takes "inf" for a type.
        return math.inf if value == "inf" else None
    is_number = isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


def global_norm(sync: RankSync, request: SyncRequest, gradients: Sequence[Tensor], power: float) -> Tensor:
    """The norm over the gradients of all ranks, the same on every one; float64 on the host.

    What is scaled by the largest entry cannot overflow, however large the entries are.
    """
    here = float(_largest(map(_highest, gradients)))
    largest = sync.exchange(request, SyncVote(maxes=(here,))).maxes[0]
    if math.isinf(power) or not math.isfinite(largest) or largest == 0.0:
        return torch.tensor(largest, dtype=torch.float64)
    # Replicas have the same gradients, unless these are sharded: then each has a part.
    parts = torch.zeros(2, dtype=torch.float64)
    for gradient in gradients:
        parts[int(isinstance(gradient, DTensor))] += _powers(gradient, largest, power)
    heard = sync.exchange(request, SyncVote(sums=tuple(parts.tolist())))
    # Summed in the order of the ranks on every rank: the same number everywhere.
    return torch.tensor(largest * (heard.pipeline_sums[0] + heard.sums[1]) ** (1.0 / power), dtype=torch.float64)


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


def _largest(values: Iterable[Tensor]) -> Tensor:
    """The maximum, NaN if one is NaN."""
    found = list(values)
    return torch.stack(found).max() if found else torch.zeros((), dtype=torch.float64)


def _powers(gradient: Tensor, largest: float, power: float) -> Tensor:
    scaled = _local(gradient).abs().to(torch.float64).div_(largest)
    return (scaled.square_() if power == 2.0 else scaled.pow_(power)).sum().cpu()


def _local(gradient: Tensor) -> Tensor:
    """This rank's part of a sharded gradient, or all of it; the entries that a sparse one has."""
    gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return gradient.coalesce().values() if gradient.is_sparse else gradient
