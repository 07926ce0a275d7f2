"""Selects samples of a batch, joins them again, and makes artificial outputs on which a loss can be evaluated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.capture import in_precision, is_inexact, is_integer
from penstock.ir import leaves, map_leaves

LARGE = 1 << 20
"""entries of an output above which only few samples are evaluated at a time, and in float32 instead of float64"""
SMALL_SCALE = 1 / 16
"""the scale of the outputs of every other part: of the even parts in one draw, and of the odd parts in the next.
Weights that depend on the outputs, as those of a clamped mean or of a maximum do, differ between the two draws."""

Dims = Sequence[int | None]
"""for every leaf of a structure the dimension that holds the samples, or None"""


@dataclass(frozen=True)
class SampleRange:
    """Consecutive samples of one microbatch."""

    microbatch: int
    start: int
    length: int


def sample_dims(output: Any, size: int, preferred: int = 0) -> list[int | None]:
    """The dimension of samples in every leaf of an output of `size` samples.

    It is the `preferred` dimension if that has length `size`, or the only one that has. A first dimension that is a
    multiple of `size` holds several rows for each sample, as after `flatten(0, 1)`.
    """
    dims: list[int | None] = []
    for leaf in leaves(output):
        if not isinstance(leaf, Tensor) or not leaf.dim():
            dims.append(None)
            continue
        fitting = [dim for dim, length in enumerate(leaf.shape) if length == size]
        if preferred in fitting:
            dims.append(preferred)
        elif len(fitting) == 1:
            dims.append(fitting[0])
        else:
            dims.append(0 if leaf.shape[0] % size == 0 else None)
    return dims


def join(structures: Sequence[Any], dims: Dims) -> Any:
    """Concatenate structures of some samples each into one structure of all of them."""
    joined = iter(
        [
            torch.cat(column, dim) if dim is not None and len(column) > 1 else column[0]
            for column, dim in zip(zip(*map(leaves, structures), strict=True), dims, strict=True)
        ]
    )
    return map_leaves(structures[0], lambda leaf: next(joined))


def repeat_positions(output: Any, size: int, length: int, new_length: int) -> Any:
    """An output of `size` samples for sequences of another length: its positions are repeated or left out."""

    def repeated(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        positions = torch.arange(new_length, device=leaf.device) % length
        if leaf.dim() > 1 and leaf.shape[:2] == (size, length):
            return leaf.index_select(1, positions)
        if leaf.shape[0] == size * length:  # as after flatten(0, 1)
            return leaf.unflatten(0, (size, length)).index_select(1, positions).flatten(0, 1)
        return leaf

    return output if length == new_length else map_leaves(output, repeated)


def choose_parts(
    sizes: Sequence[int],
    sample_size: int,
    tensors: Sequence[Mapping[str, Tensor]] = (),
    max_parts: int = 2,
    step_number: int = 0,
) -> list[SampleRange]:
    """Samples of at most `max_parts` microbatches on which to evaluate a loss.

    Whole microbatches if their outputs, of `sample_size` entries per sample, are not too large: a loss may depend on
    the number of samples. Ignored labels are usually the smallest or the largest ones, so the microbatches that hold
    these are chosen; `step_number` rotates the choice among the others. `tensors` are those of every microbatch that
    may hold labels.
    """
    rows = max(1, LARGE // max(sample_size, 1))
    if len(sizes) == 1:
        # There is no second microbatch to compare with: this one is cut in two, or its only sample is taken twice.
        first, second = min(rows, (sizes[0] + 1) // 2), min(rows, sizes[0] // 2)
        return (
            [SampleRange(0, 0, first), SampleRange(0, first, second)]
            if second
            else [SampleRange(0, 0, 1), SampleRange(0, 0, 1)]
        )
    # The first sample to take of each microbatch. The order of the dict is the order of preference.
    starts = {index % len(sizes): 0 for index in range(step_number, step_number + len(sizes))}
    for name, leaf in tensors[0].items() if tensors else ():
        labels = [named[name] for named in tensors]
        if is_integer(leaf) and leaf.numel() and all(t.shape[:1] == (n,) for t, n in zip(labels, sizes, strict=True)):
            rows_of_labels = [tensor.reshape(size, -1) for tensor, size in zip(labels, sizes, strict=True)]
            smallest = torch.cat([tensor.amin(1) for tensor in rows_of_labels]).argmin()
            largest = torch.cat([tensor.amax(1) for tensor in rows_of_labels]).argmax()
            # argmin and argmax count the samples of all microbatches; this list maps them back.
            samples = [(index, row) for index, size in enumerate(sizes) for row in range(size)]
            # Read at once: on a GPU every read waits for the device.
            extremes = dict(samples[position] for position in torch.stack([smallest, largest]).tolist())
            starts = {**extremes, **{index: 0 for index in starts if index not in extremes}}
            break
    chosen = sorted(list(starts)[:max_parts])
    # A start near the end of a microbatch is moved back, so that every part has its `rows` samples.
    return [SampleRange(i, min(starts[i], max(0, sizes[i] - rows)), min(rows, sizes[i])) for i in chosen]


def artificial_output(
    output: Any, dims: Dims, size: int, length: int, seed: int, scale: float, dtype: torch.dtype | None
) -> Any:
    """An output for `length` samples that requires gradients, derived from the real output of `size` samples.

    Its entries are real ones, each made smaller by a random factor: losses of probabilities or of variances are not
    defined on arbitrary noise, and on a GPU an entry out of range ends the process. Only if all entries are zero, as
    after a head that was initialised with zeros, are they drawn from a normal distribution.
    """
    remaining_dims = iter(dims)
    # Drawn with replacement: weights that depend on the signs or the order of entries, as those of a mean over positive
    # outputs do, would be equal in parts with the same samples.
    chosen = torch.randint(size, (length,), generator=torch.Generator().manual_seed(seed))

    def make(leaf: object) -> object:
        dim = next(remaining_dims)
        if not isinstance(leaf, Tensor):
            return leaf
        picked = leaf.detach()
        if dim is not None:
            # Several rows may belong to a sample, as after `flatten(0, 1)`.
            rows = leaf.shape[dim] // size
            index = (chosen.to(leaf.device).unsqueeze(1) * rows + torch.arange(rows, device=leaf.device)).flatten()
            picked = picked.index_select(dim, index)
        if not is_inexact(leaf):
            return picked
        picked = in_precision(picked, dtype).nan_to_num(0.0, 1.0, -1.0)
        if dim is not None:
            generator = torch.Generator(device=leaf.device).manual_seed(seed)
            options: dict[str, Any] = {"generator": generator, "dtype": picked.real.dtype, "device": leaf.device}
            if picked.any():
                picked = picked * (scale * (1 - torch.rand(picked.shape, **options) / 2))
            else:
                picked = torch.randn(picked.shape, **options).to(picked.dtype) * scale
        return picked.detach().requires_grad_()

    return map_leaves(output, make)
