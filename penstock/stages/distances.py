"""Distances: how far the tensors of one run are from those of another."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from penstock.ir import Distance

Numbers = Mapping[str, Tensor | None]


def distances(expected: Numbers, found: Numbers) -> Iterator[Distance]:
    """One for every name in either; equal infinities, and NaN in the same places, are no distance."""
    for name in dict.fromkeys((*expected, *found)):
        yield _distance(name, expected.get(name), found.get(name))


def _distance(name: str, expected: Tensor | None, found: Tensor | None) -> Distance:
    if expected is None or found is None or expected.shape != found.shape:
        return Distance(name, 0.0 if expected is None and found is None else float("inf"))
    one, other = _exact(expected), _exact(found)
    differs = (one != other) & ~(one.isnan() & other.isnan())
    apart = float((one - other)[differs].abs().max()) if bool(differs.any()) else 0.0
    return Distance(name, apart, _largest(one), str(expected.dtype).removeprefix("torch."))


def _exact(number: Tensor) -> Tensor:
    number = number.detach().to_dense() if number.is_sparse else number.detach()
    return number.to(torch.complex128 if number.is_complex() else torch.float64)


def _largest(number: Tensor) -> float:
    finite = number.abs()[number.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0
