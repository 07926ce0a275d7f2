"""Merge: the outputs of microbatches as the output of their batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.ir import Parts, put_together, take_apart
from penstock.runtime.weights import weighted_sum

Shape = tuple[int, ...]


def merge(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    whole: Sequence[Shape] | None = None,
) -> Any:
    """One output from those of the microbatches, `sizes` being their samples.

    Tensors that carry the batch are concatenated. Floating 0-dim tensors, such as losses, are summed with the weights;
    without weights it is their mean over the samples. Anything else is the first one if all are equal, else a list.
    `whole` are the shapes of the tensors for the whole batch, left to right: with them it is certain which dimension
    is the batch. Without them, microbatches of different sizes tell, and among equal ones it is a first dimension of
    that size, unless all tensors are the same memory: those were given whole.
    """
    weights = [size / sum(sizes) for size in sizes] if weights is None else weights
    return _merged(list(outputs), sizes, weights, iter(whole) if whole is not None else None)


def _merged(things: list[Any], sizes: Sequence[int], weights: Sequence[float], whole: Any) -> Any:
    taken = [take_apart(thing) for thing in things]
    parts = [part for part in taken if part is not None]
    if len(parts) == len(things) and all(_alike(part, parts[0]) for part in parts):
        columns = zip(*(part.items for part in parts), strict=True)
        items = [_merged(list(column), sizes, weights, whole) for column in columns]
        return put_together(parts[0].kind, parts[0].keys, items)
    if all(isinstance(thing, Tensor) for thing in things):
        return _tensor(things, sizes, weights, next(whole, None) if whole is not None else None)
    return _one_or_all(things)


def _alike(one: Parts, other: Parts) -> bool:
    return one.kind is other.kind and one.keys == other.keys and one.kind is not slice


def _tensor(tensors: list[Tensor], sizes: Sequence[int], weights: Sequence[float], whole: Shape | None) -> Any:
    if all(not tensor.dim() and tensor.is_floating_point() for tensor in tensors):
        return weighted_sum(tensors, weights)
    if len(tensors) == 1:
        return tensors[0]
    dim = batch_dim([tuple(tensor.shape) for tensor in tensors], sizes, whole)
    if dim is None or (whole is None and _is_one_memory(tensors)):
        return _one_or_all(tensors)
    return torch.cat(tensors, dim)


def batch_dim(shapes: Sequence[Shape], sizes: Sequence[int], whole: Shape | None = None) -> int | None:
    """The dimension that carries the samples, from the shapes of one tensor in microbatches of these sizes.

    None if there is none, or more than one, as in a product of all samples with each other.
    """
    if len({len(shape) for shape in (*shapes, *([whole] if whole is not None else []))}) > 1:
        return None
    if whole is not None:
        changed = [dim for dim, size in enumerate(whole) if any(shape[dim] != size for shape in shapes)]
        fits = len(changed) == 1 and sum(shape[changed[0]] for shape in shapes) == whole[changed[0]]
        return changed[0] if fits else None
    if len(set(sizes)) > 1:
        changed = [dim for dim, column in enumerate(zip(*shapes, strict=True)) if len(set(column)) > 1]
        fits = len(changed) == 1 and _is_proportional([shape[changed[0]] for shape in shapes], sizes)
        return changed[0] if fits else None
    return 0 if len(set(shapes)) == 1 and shapes[0] and shapes[0][0] == sizes[0] else None


def _is_proportional(lengths: Sequence[int], sizes: Sequence[int]) -> bool:
    """Samples may be several rows each, as where tokens of all samples are one dimension."""
    return all(length * sizes[0] == lengths[0] * size for length, size in zip(lengths, sizes, strict=True))


def _is_one_memory(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    return all(other.data_ptr() == first.data_ptr() and other.stride() == first.stride() for other in tensors)


def _one_or_all(things: list[Any]) -> Any:
    return things[0] if all(_is_equal(thing, things[0]) for thing in things) else things


def _is_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return torch.equal(one, other)
        return type(one) is type(other) and bool(one == other)
    except (ValueError, TypeError, RuntimeError):
        # Arrays and the like have no single answer.
        return False
