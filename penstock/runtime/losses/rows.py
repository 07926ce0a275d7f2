"""Rows: some of the samples of a batch, and two batches as one, by the dimension that holds the samples."""

from typing import Any

import torch
from torch import Tensor

from penstock.ir import leaves, put_together, take_apart, transform


def samples_dim(leaf: object, size: int) -> int | None:
    """The dimension of a tensor that holds so many samples: the first, or else the only one that is as long."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return None
    if leaf.shape[0] == size:
        return 0
    found = [dim for dim, length in enumerate(leaf.shape) if length == size]
    return found[0] if len(found) == 1 else None


def rows(thing: Any, size: int, start: int, length: int) -> Any:
    """The same structure for some of its samples; what holds no samples is given whole."""

    def narrowed(leaf: object) -> object:
        dim = samples_dim(leaf, size)
        return leaf.narrow(dim, start, length) if isinstance(leaf, Tensor) and dim is not None else leaf

    return transform(thing, narrowed)


def joined(one: Any, other: Any) -> Any:
    """Two samples, each in a structure of its own, as a batch of two; raises a ValueError where they differ in form."""
    parts, others = take_apart(one), take_apart(other)
    if parts is not None and others is not None and parts.keys == others.keys and len(parts.items) == len(others.items):
        items = [joined(*pair) for pair in zip(parts.items, others.items, strict=True)]
        return put_together(parts.kind, parts.keys, items)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        dim = samples_dim(one, 1)
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ValueError("samples of different forms")
        return one if dim is None else torch.cat([one, other], dim)
    return one


def another(thing: Any) -> Any:
    """A sample of the same form with other numbers: entries change places, so that they stay in their range."""

    def rolled(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        last = [dim for dim, length in enumerate(leaf.shape) if length > 1][-1:]
        return leaf.roll(1, last[0]) if last else leaf

    return transform(thing, rolled)


def tensors(thing: Any) -> list[Tensor]:
    """The tensors of a structure, left to right."""
    return [leaf for leaf in leaves(thing) if isinstance(leaf, Tensor)]
