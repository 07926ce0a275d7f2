"""Splits the arguments and the target of a step into microbatches."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.capture.cuts import (
    TARGET,
    Argument,
    Cut,
    Split,
    batch_size,
    check_split,
    find_cuts,
    has_rule,
    named_arguments,
)
from penstock.capture.objects import register_containers
from penstock.errors import CaptureError, RunError
from penstock.ir import named_leaves, put_together, take_apart

_TOO_FEW_VALUES = "Expected more than 1 value per channel when training"
"""how the error of torch's batch norm begins"""


@dataclass(frozen=True)
class Microbatch:
    """The arguments of the model and the target of the loss for some samples of a batch; tensors are views of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int
    """number of samples"""
    cuts: dict[str, Cut]
    """by path in (args, kwargs, target); everything else is the same for all samples"""

    def take(self, start: int, length: int) -> "Microbatch":
        """Some of the samples."""
        args, kwargs, target = _part((self.args, self.kwargs, self.target), "", self.cuts, start, length)
        cuts = {path: cut.within(start, length) for path, cut in self.cuts.items()}
        return Microbatch(args, kwargs, target, length, cuts)

    def countable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the named tensors that every microbatch has, with the same number of rows for each sample."""
        left_out = [cut.name for cut in self.cuts.values() if cut.dim is None or cut.offsets]
        prefixes = tuple(f"{name}." for name in left_out)
        return {name: tensor for name, tensor in tensors.items() if not f"{name}.".startswith(prefixes)}

    @staticmethod
    def join(parts: Sequence["Microbatch"]) -> "Microbatch":
        """The samples of several microbatches of one batch together."""
        if len(parts) == 1:
            return parts[0]
        structures = [(part.args, part.kwargs, part.target) for part in parts]
        args, kwargs, target = _joined(structures, "", parts[0].cuts)
        cuts = dict(parts[0].cuts)
        for path, cut in cuts.items():
            if cut.offsets:
                lengths = [end - start for part in parts for start, end in pairwise(part.cuts[path].offsets)]
                cuts[path] = replace(cut, offsets=tuple(accumulate(lengths, initial=0)))
        return Microbatch(args, kwargs, target, sum(part.size for part in parts), cuts)


def split_batch(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    num_microbatches: int,
    split: Split | None = None,
    planned: Split | None = None,
) -> tuple[Microbatch, ...]:
    """Split a batch into microbatches, larger ones first; into fewer if there are fewer samples.

    Tensors whose first dimension is the batch are split along it. A list or tuple of dicts or dataclasses with one
    entry per sample, as the labels of a detector, is split by its entries; any other list or tuple is searched for
    tensors to split. Everything else is passed whole to every microbatch. A list that may be either, because it has
    as many entries as the batch has samples, is refused. `split` overrides all this by the name of a parameter of the
    forward, of `target`, or of a part of either (`batch.mask`); see `SplitRule`. `planned` are the rules of a plan
    for arguments that `split` does not name; this batch need not have these arguments.

    The size of the batch is that of the first argument from which it follows.
    """
    register_containers((args, kwargs, target))
    split = dict(split or {})
    arguments = named_arguments(forward, args, kwargs)
    everything = (*arguments, Argument(TARGET, ".2", target))
    check_split(split, everything, inspect.signature(forward).parameters)
    split |= {name: rule for name, rule in (planned or {}).items() if not has_rule(name, split)}
    batch = batch_size(arguments, split)
    sizes = microbatch_sizes(batch, num_microbatches)
    cuts = find_cuts(everything, batch, split, is_final=len(sizes) == 1)
    is_ragged = any(cut.offsets for cut in cuts.values())
    return tuple(
        Microbatch(
            tuple(_part(arg, f".0.{position}", cuts, start, size) for position, arg in enumerate(args)),
            {key: _part(arg, f".1.{key}", cuts, start, size) for key, arg in kwargs.items()},
            _part(target, ".2", cuts, start, size),
            size,
            {path: cut.within(start, size) for path, cut in cuts.items()} if is_ragged else cuts,
        )
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
    )


def microbatch_sizes(batch: int, num_microbatches: int) -> tuple[int, ...]:
    """The number of samples of each microbatch: equal to within one, larger ones first, none of them empty."""
    if num_microbatches < 1:
        raise RunError("a step needs at least one microbatch", microbatches=num_microbatches)
    least, more = divmod(batch, num_microbatches)
    return tuple(size for size in (least + (index < more) for index in range(num_microbatches)) if size)


def _part(value: Any, path: str, cuts: Mapping[str, Cut], start: int, length: int) -> Any:
    """The structure for some samples: whatever is cut is replaced by its part."""
    cut = cuts.get(path)
    if cut is not None:
        return cut.part(value, start, length)
    parts = take_apart(value)
    if parts is None:
        return value
    pairs = zip(parts.keys, parts.items, strict=True)
    items = [_part(item, f"{path}.{key}", cuts, start, length) for key, item in pairs]
    return put_together(parts.kind, parts.keys, items)


def _joined(values: Sequence[Any], path: str, cuts: Mapping[str, Cut]) -> Any:
    cut, first = cuts.get(path), values[0]
    if cut is not None:
        if cut.dim is not None:
            return torch.cat(list(values), cut.dim)
        entries = [entry for value in values for entry in value]
        return put_together(type(first), range(len(entries)), entries)
    parts = take_apart(first)
    if parts is None:
        return first
    columns = zip(*(_items(value) for value in values), strict=True)
    items = [_joined(column, f"{path}.{key}", cuts) for key, column in zip(parts.keys, columns, strict=True)]
    return put_together(parts.kind, parts.keys, items)


def _items(value: Any) -> tuple[Any, ...]:
    parts = take_apart(value)
    assert parts is not None
    return parts.items


def explain_failure(
    error: CaptureError, forward: Callable[..., Any], microbatches: Sequence[Microbatch]
) -> CaptureError:
    """The error of a model that cannot be run on a microbatch, with the way in which the batch was split."""
    if error.__cause__ is None or len(microbatches) < 2:
        return error
    batch, first = sum(microbatch.size for microbatch in microbatches), microbatches[0]
    if microbatches[-1].size == 1 and str(error.__cause__).startswith(_TOO_FEW_VALUES):
        fewer = f"microbatches={batch // 2} or fewer" if batch > 3 else "microbatches=1"
        return CaptureError(
            "batch norm in training needs more than one value per channel, but a microbatch has a single sample",
            module=error.values.get("module", ""),
            batch=batch,
            microbatches=len(microbatches),
            hint=f"{fewer}, so that each has at least two samples, or a larger batch",
        )
    cut_names = tuple(f"{cut.name}." for cut in first.cuts.values())
    whole = [
        (name, tuple(leaf.shape))
        for argument in named_arguments(forward, first.args, first.kwargs)
        for name, leaf in named_leaves(argument.value, argument.name)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] > 1 and not f"{name}.".startswith(cut_names)
    ]
    if not whole:
        return error
    names = ", ".join(f"{name!r}: ..." for name, _ in whole)
    values = {**error.values, "passed_whole": ", ".join(f"{name} {shape}" for name, shape in whole), "batch": batch}
    hint = f"{error.hint}; if it runs on the whole batch, split={{{names}}} to split these arguments too"
    return CaptureError(error.problem, hint=hint, report=error.report, **values)
