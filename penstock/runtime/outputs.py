"""The outputs of the last stage, merged over the microbatches and sent to every rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.ir import Parts, leaves, put_together, take_apart
from penstock.loss import weighted_sum
from penstock.runtime.broadcast import broadcast_refusal, broadcast_structure
from penstock.runtime.groups import ProcessGroups

Shape = tuple[int, ...]


def share_outputs(
    groups: ProcessGroups,
    source: int,
    device: torch.device,
    outputs: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float] | None,
) -> Any:
    """Merge the outputs on rank `source`, which has the last stage, and return the result on every rank.

    On other ranks, containers of types that only the model defines become dicts.
    """
    if groups.is_local:
        return merge(outputs, sizes, weights)
    if groups.rank != source:
        return broadcast_structure(groups, None, source, device)
    try:
        merged = merge(outputs, sizes, weights)
    except Exception as error:
        broadcast_refusal(groups, error, source)
        raise
    broadcast_structure(groups, _plain(merged), source, device)
    return merged


def _plain(thing: Any) -> Any:
    """The same structure of lists, tuples and dicts; leaves that are neither tensors nor plain values become None."""
    parts = take_apart(thing)
    if parts is None:
        is_known = hasattr(thing, "shape") or thing is None or type(thing) in (bool, int, float, str)
        return thing if len(leaves(thing)) == 1 and is_known else None
    items = [_plain(item) for item in parts.items]
    if parts.kind in (list, tuple):
        return put_together(parts.kind, parts.keys, items)
    return {str(key): item for key, item in zip(parts.keys, items, strict=True)}


def merge(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    weights: Sequence[float] | None = None,
    whole: Sequence[Shape] | None = None,
) -> Any:
    """Merge the outputs of microbatches with these numbers of samples into the output of the batch.

    Tensors with a batch dimension are concatenated. Floating-point scalars, such as losses, are summed with the weights
    (default: the shares of the samples). Other values that are equal in all microbatches
    become one value, and any others a list.

    The batch dimension follows from `whole`, the shapes of the tensors for the whole batch, left to right. Without
    them it is the one that differs between microbatches of different sizes; among equal ones a first dimension of that
    size, unless all tensors share one memory: such a tensor was passed whole to every microbatch.
    """
    weights = [size / sum(sizes) for size in sizes] if weights is None else weights
    return _merged(list(outputs), sizes, weights, iter(whole) if whole is not None else None)


def _merged(things: list[Any], sizes: Sequence[int], weights: Sequence[float], whole: Any) -> Any:
    taken = [take_apart(thing) for thing in things]
    parts = [part for part in taken if part is not None]
    if len(parts) == len(things) and all(_has_structure_of(part, parts[0]) for part in parts):
        columns = zip(*(part.items for part in parts), strict=True)
        items = [_merged(list(column), sizes, weights, whole) for column in columns]
        return put_together(parts[0].kind, parts[0].keys, items)
    if all(isinstance(thing, Tensor) for thing in things):
        return _tensor(things, sizes, weights, next(whole, None) if whole is not None else None)
    return _one_or_all(things)


def _has_structure_of(one: Parts, other: Parts) -> bool:
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
    """The batch dimension of a tensor, from its shapes in microbatches of these sizes.

    None if no dimension, or more than one, depends on the batch, as in a product of all samples with each other.
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
    # Samples may have several rows each, as where the tokens of all samples are one dimension.
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
        # The comparison of arrays is an array, which has no truth value.
        return False
