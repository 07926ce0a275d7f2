"""Selects samples of a batch, joins them again, and makes outputs for them that a loss can be evaluated on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.ir import leaves, transform

LARGE = 1 << 20
"""Entries of an output above which only few samples are evaluated at a time, and in float32 instead of float64."""
SMALL_SCALE = 1 / 16
"""The outputs of every other part are this much smaller, those of the even parts in one draw and of the odd parts in
the next. Weights that depend on the outputs, as those of a clamped mean or of a maximum do, differ between the two."""

Dims = Sequence[int | None]
"""for every leaf of a structure the dimension that holds the samples, or None"""


@dataclass(frozen=True)
class Part:
    """Some samples of one microbatch."""

    microbatch: int
    start: int
    length: int


def sample_dims(thing: Any, size: int, next_one: Any = None, preferred: int = 0) -> list[int | None]:
    """The dimension of samples in every leaf of the structure that a microbatch of `size` samples has.

    `next_one` is the structure of the next microbatch. Where both are views of one tensor, their distance in memory
    gives the dimension; where both are the same object, it was passed whole and has none. Otherwise it is the
    `preferred` dimension if that has length `size`, or the only one that has. A first dimension that is a multiple of
    `size` holds several rows for each sample, as after `flatten(0, 1)`.
    """
    found: list[int | None] = []
    others: list[Any] = [None] * len(leaves(thing)) if next_one is None else leaves(next_one)
    for leaf, other in zip(leaves(thing), others, strict=True):
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf is other:
            found.append(None)
            continue
        fitting = [dim for dim, length in enumerate(leaf.shape) if length == size]
        if isinstance(other, Tensor) and leaf.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
            distance = other.storage_offset() - leaf.storage_offset()
            fitting = [dim for dim in fitting if leaf.stride(dim) * size == distance] or fitting
        if preferred in fitting:
            found.append(preferred)
        elif len(fitting) == 1:
            found.append(fitting[0])
        else:
            found.append(0 if leaf.shape[0] % size == 0 else None)
    return found


def take(thing: Any, dims: Dims, size: int, start: int, length: int) -> Any:
    """The same structure for `length` of its `size` samples."""
    left = iter(dims)

    def narrowed(leaf: object) -> object:
        dim = next(left)
        if not isinstance(leaf, Tensor) or dim is None:
            return leaf
        rows = leaf.shape[dim] // size
        return leaf.narrow(dim, start * rows, length * rows)

    return transform(thing, narrowed)


def join(things: Sequence[Any], dims: Dims) -> Any:
    """Concatenate structures of some samples each into one structure of all of them."""
    joined = iter(
        [
            torch.cat(column, dim) if dim is not None and len(column) > 1 else column[0]
            for column, dim in zip(zip(*map(leaves, things), strict=True), dims, strict=True)
        ]
    )
    return transform(things[0], lambda leaf: next(joined))


def choose_parts(
    sizes: Sequence[int], sample_size: int, tensors: Sequence[Mapping[str, Tensor]] = (), most: int = 2, turn: int = 0
) -> list[Part]:
    """Samples of at most `most` microbatches on which to evaluate a loss.

    Whole microbatches if their outputs, of `sample_size` entries per sample, are not too large: a loss may depend on
    the number of samples. Ignored labels are usually the smallest or the largest ones, so the microbatches that hold
    these are chosen; `turn` rotates the choice among the others.
    """
    rows = max(1, LARGE // max(sample_size, 1))
    if len(sizes) == 1:
        # There is no other microbatch to compare with: this one is cut in two, or its first sample is taken twice.
        first, second = min(rows, (sizes[0] + 1) // 2), min(rows, sizes[0] // 2)
        return [Part(0, 0, first), Part(0, first, second)] if second else [Part(0, 0, 1), Part(0, 0, 1)]
    starts = {place % len(sizes): 0 for place in range(turn, turn + len(sizes))}
    for name, leaf in tensors[0].items() if tensors else ():
        is_integer = not leaf.is_floating_point() and leaf.dtype != torch.bool
        if (
            is_integer
            and leaf.numel()
            and all(own[name].shape[:1] == (n,) for own, n in zip(tensors, sizes, strict=True))
        ):
            labels = [own[name].reshape(size, -1) for own, size in zip(tensors, sizes, strict=True)]
            lows, highs = torch.cat([one.amin(1) for one in labels]), torch.cat([one.amax(1) for one in labels])
            places = [(place, row) for place, size in enumerate(sizes) for row in range(size)]
            extremes = dict(places[place] for place in torch.stack([lows.argmin(), highs.argmax()]).tolist())
            starts = {**extremes, **{place: 0 for place in starts if place not in extremes}}
            break
    chosen = sorted(list(starts)[:most])
    return [Part(one, min(starts[one], max(0, sizes[one] - rows)), min(rows, sizes[one])) for one in chosen]


def stand_in(
    output: Any, dims: Dims, size: int, length: int, seed: int, scale: float, dtype: torch.dtype | None
) -> Any:
    """An output for `length` samples that requires gradients, derived from the real output of `size` samples.

    Its entries are real ones, each made smaller by a random factor: losses of probabilities or of variances are not
    defined on arbitrary noise, and on a GPU an entry out of range ends the process. Only if all entries are zero, as
    after a head that was initialised with zeros, are they drawn from a normal distribution.
    """
    left = iter(dims)

    def drawn(leaf: object) -> object:
        dim = next(left)
        if not isinstance(leaf, Tensor):
            return leaf
        picked = leaf.detach()
        if dim is not None:
            rows = leaf.shape[dim] // size
            chosen = (torch.arange(length, device=leaf.device) + seed) % size
            index = (chosen.unsqueeze(1) * rows + torch.arange(rows, device=leaf.device)).flatten()
            picked = picked.index_select(dim, index)
        if not (leaf.is_floating_point() or leaf.is_complex()):
            return picked
        kind = leaf.dtype if dtype is None or leaf.is_complex() else dtype
        picked = picked.to(kind).nan_to_num(0.0, 1.0, -1.0)
        if dim is not None:
            generator = torch.Generator(device=leaf.device).manual_seed(seed)
            options: dict[str, Any] = {"generator": generator, "dtype": picked.real.dtype, "device": leaf.device}
            if picked.any():
                picked = picked * (scale * (1 - torch.rand(picked.shape, **options) / 2))
            else:
                picked = torch.randn(picked.shape, **options).to(kind) * scale
        return picked.detach().requires_grad_()

    return transform(output, drawn)
