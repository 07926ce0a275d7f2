"""Splits the arguments and the target of a step into microbatches.

With `budget_tokens`, `runtime/token_budget.py` selects the samples of each microbatch (`planner/token_groups.py`), and
`padding.py` takes them out of the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batches.sample_axes import (
    TARGET,
    Argument,
    SampleAxis,
    SampleAxisFinder,
    Split,
    batch_size,
    check_split_of_step,
    has_rule,
)
from penstock.capture import PLAIN_TYPES, LruCache, register_containers
from penstock.errors import CaptureError, RunError
from penstock.ir import flatten_one_level, named_arguments, named_inputs, signature_of, unflatten_one_level

_TOO_FEW_VALUES = "Expected more than 1 value per channel when training"
"""how the error of torch's batch norm begins"""


class Batch(NamedTuple):
    """The arguments of the model and the target of the loss in one step."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    target: Any = None


class Columns(NamedTuple):
    """Which samples and which positions of a padded batch a microbatch holds."""

    whole: "Microbatch"
    samples: tuple[int, ...]
    names: frozenset[str]
    """the tensors that hold a position of the sequence in each column"""
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of positions of each sample."""
        return self.stop - self.start


class Microbatch(NamedTuple):
    """The arguments of the model and the target of the loss for some samples of a batch; tensors are views of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int
    """number of samples"""
    axes: dict[str, SampleAxis]
    """by the name of an argument, of `target` or of a part of either; everything else is the same for all samples"""
    names: tuple[str, ...] = ()
    """of the positional arguments"""
    columns: Columns | None = None
    """with `budget_tokens`, the samples and positions of the batch that it holds"""

    def take(self, start: int, length: int) -> "Microbatch":
        """The microbatch of `length` of the samples, beginning with sample `start`."""
        return self.split((start, length, self.size - start - length))[1]

    def split(self, sizes: Sequence[int]) -> tuple["Microbatch", ...]:
        """Split it into microbatches of these numbers of samples, which add up to `size`."""
        starts = list(accumulate(sizes, initial=0))

        def pieces(value: Any, name: str) -> Sequence[Any]:
            axis = self.axes.get(name)
            if axis is None:
                parts = flatten_one_level(value)
                if parts is None:
                    return [value] * len(sizes)
                columns = [pieces(item, f"{name}.{key}") for key, item in zip(parts.keys, parts.items, strict=True)]
                rows = [[column[index] for column in columns] for index in range(len(sizes))]
                return [unflatten_one_level(parts.kind, parts.keys, row) for row in rows]
            if axis.dim is None:
                slices = [value[start:end] for start, end in pairwise(starts)]
                return [unflatten_one_level(type(value), range(len(each)), each) for each in slices]
            lengths = [axis.rows * size for size in sizes]
            if axis.offsets:
                lengths = [axis.offsets[end] - axis.offsets[start] for start, end in pairwise(starts)]
            if value.layout is not torch.strided:
                return _sparse_parts(value, name, lengths, axis.dim)
            # `split` takes half the time, but its results could not be written in place.
            return split_tensor(value, lengths, axis.dim) if value.requires_grad else value.split(lengths, axis.dim)

        args = [pieces(arg, name) for name, arg in zip(self.names, self.args, strict=True)]
        kwargs = [pieces(arg, name) for name, arg in self.kwargs.items()]
        # Without a target, an axis of this name is that of an argument of the forward.
        targets = [None] * len(sizes) if self.target is None else pieces(self.target, TARGET)
        axes = [self.axes] * len(sizes)
        if any(axis.offsets for axis in self.axes.values()):
            pairs = zip(starts, sizes, strict=False)
            axes = [{name: axis.within(start, size) for name, axis in self.axes.items()} for start, size in pairs]
        nothing = [()] * len(sizes)
        args_of = list(zip(*args, strict=True)) or nothing
        kwargs_of = [dict(zip(self.kwargs, row, strict=True)) for row in list(zip(*kwargs, strict=True)) or nothing]
        rows = zip(args_of, kwargs_of, targets, sizes, axes, strict=True)
        return tuple([Microbatch(*row, self.names) for row in rows])

    def map_split_values(self, choose: Callable[[Any, str, SampleAxis], Any], size: int) -> "Microbatch":
        """The microbatch of `size` samples in which `choose(value, name, axis)` replaces values that have an axis."""

        def chosen(value: Any, name: str) -> Any:
            axis = self.axes.get(name)
            if axis is not None:
                entries = choose(value, name, axis)
                return unflatten_one_level(type(value), range(size), entries) if axis.dim is None else entries
            parts = flatten_one_level(value)
            if parts is None:
                return value
            items = [chosen(item, f"{name}.{key}") for key, item in zip(parts.keys, parts.items, strict=True)]
            return unflatten_one_level(parts.kind, parts.keys, items)

        args = tuple([chosen(arg, name) for name, arg in zip(self.names, self.args, strict=True)])
        kwargs = {name: chosen(arg, name) for name, arg in self.kwargs.items()}
        # Without a target, an axis of this name is that of an argument of the forward.
        target = None if self.target is None else chosen(self.target, TARGET)
        return Microbatch(args, kwargs, target, size, self.axes, self.names)

    def countable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the named tensors that every microbatch has, with the same number of rows for each sample."""
        left_out = tuple(f"{name}." for name, axis in self.axes.items() if axis.dim is None or axis.offsets)
        return {name: tensor for name, tensor in tensors.items() if not f"{name}.".startswith(left_out)}

    @staticmethod
    def join(microbatches: Sequence["Microbatch"]) -> "Microbatch":
        """The samples of several microbatches of one batch together."""
        first = microbatches[0]
        if len(microbatches) == 1:
            return first
        axes = dict(first.axes)
        for name, axis in axes.items():
            if axis.offsets:
                lengths = [end - start for each in microbatches for start, end in pairwise(each.axes[name].offsets)]
                axes[name] = replace(axis, offsets=tuple(accumulate(lengths, initial=0)))
        columns = zip(first.names, zip(*(each.args for each in microbatches), strict=True), strict=True)
        return Microbatch(
            tuple(_joined(values, name, axes) for name, values in columns),
            {name: _joined([each.kwargs[name] for each in microbatches], name, axes) for name in first.kwargs},
            None if first.target is None else _joined([each.target for each in microbatches], TARGET, axes),
            sum(each.size for each in microbatches),
            axes,
            first.names,
        )


def select_columns(columns: Columns) -> Microbatch:
    """The microbatch of some samples and columns of a batch, copied into contiguous memory."""
    whole, index = columns.whole, {}

    def chosen(value: Any, name: str, axis: SampleAxis) -> Any:
        if axis.dim is None:
            return [value[sample] for sample in columns.samples]
        if axis.dim != 0 or axis.rows != 1 or axis.offsets:
            raise RunError(
                "budget_tokens needs arguments whose first dimension is the samples",
                argument=name,
                hint="leave out budget_tokens, or the rule of this argument in split",
            )
        if value.device not in index:
            index[value.device] = torch.tensor(columns.samples, device=value.device)
        if name in columns.names:
            value = value[:, columns.start : columns.stop]
        # Contiguous, so that the recording of a shape does not depend on the padded length of the whole batch.
        return value.index_select(0, index[value.device])

    return whole.map_split_values(chosen, len(columns.samples))._replace(columns=columns)


def with_columns_of(microbatches: Sequence[Microbatch], index: int) -> Sequence[Microbatch]:
    """All microbatches of a batch with the columns of one of them, so that they can be joined."""
    reference = microbatches[index].columns
    if reference is None:
        return microbatches
    window = {"start": reference.start, "stop": reference.stop}
    return [
        each if each.columns is None or (each.columns.start, each.columns.stop) == (reference.start, reference.stop)
        else select_columns(each.columns._replace(**window))
        for each in microbatches
    ]  # fmt: skip


def longest(microbatches: Sequence[Microbatch]) -> int:
    """The index of the microbatch with the most columns: with those every sample of the batch is complete."""
    widths = [0 if each.columns is None else each.columns.length for each in microbatches]
    return widths.index(max(widths))


class BatchSplitter:
    """Splits the batches of one model into microbatches, all by the same rules.

    Tensors whose first dimension is the batch are split along it. A list or tuple of dicts or dataclasses with one
    entry per sample, as the labels of a detector, is split by its entries; any other list or tuple is searched for
    tensors to split. Everything else is passed whole to every microbatch. A list that may be either, because it has
    as many entries as the batch has samples, is refused.
    """

    def __init__(self, forward: Callable[..., Any], split: Split | None = None, planned: Split | None = None) -> None:
        """`forward` is that of the model; `split` overrides the usual rules.

        `split` is by the name of a parameter of the forward, of `target`, or of a part of either (`batch.mask`); see
        `SplitRule`. `planned` are the rules of a plan for arguments that `split` does not name; a batch need not have
        these arguments.
        """
        self._forward, self._split, self._planned = forward, dict(split or {}), dict(planned or {})
        self._splittings: LruCache[Any, tuple[tuple[int, ...], dict[str, SampleAxis], tuple[str, ...]]] = LruCache()
        """by the structure of a batch: the size of each microbatch, the axes, and the names of positional arguments"""

    def split(self, batch: Batch, num_microbatches: int) -> tuple[Microbatch, ...]:
        """The microbatches of a batch, larger ones first; fewer if there are fewer samples.

        The size of the batch is that of the first argument from which it follows.
        """
        whole, sizes = self._find_samples(batch, num_microbatches)
        return whole.split(sizes)

    def whole(self, batch: Batch) -> Microbatch:
        """The whole batch as one microbatch, which is still to be split."""
        return self._find_samples(batch, 2)[0]

    def _find_samples(self, batch: Batch, num_microbatches: int) -> tuple[Microbatch, tuple[int, ...]]:
        """The batch as one microbatch, with its axes, and the sizes of its microbatches."""
        args, kwargs, target = tuple(batch.args), dict(batch.kwargs), batch.target
        key = _structure((args, kwargs, target)), num_microbatches
        splitting = self._splittings.find(key)
        if splitting is None:
            named = named_arguments(self._forward, args, kwargs)
            arguments = tuple(Argument(name, value) for name, value in named.items())
            # A model without a loss function may have a parameter of the target's name.
            everything = (*arguments, Argument(TARGET, target)) if target is not None else arguments
            check_split_of_step(self._split, everything, signature_of(self._forward).parameters)
            planned = {name: rule for name, rule in self._planned.items() if not has_rule(name, self._split)}
            rules = {**self._split, **planned}
            num_samples = batch_size(arguments, rules)
            sizes = microbatch_sizes(num_samples, num_microbatches)
            axes = SampleAxisFinder(num_samples, rules, is_unsplit=len(sizes) == 1).find(everything)
            splitting = sizes, axes, tuple(named)[: len(args)]
            # Offsets are read from a tensor: they hold for this batch only.
            if not any(axis.offsets for axis in axes.values()):
                self._splittings.put(key, splitting)
        sizes, axes, names = splitting
        return Microbatch(args, kwargs, target, sum(sizes), axes, names), sizes


def microbatch_kinds(microbatches: Sequence[Microbatch]) -> list[object]:
    """Equal for microbatches of one batch that differ only in the values of their tensors."""
    axes = microbatches[0].axes.values()
    if any(axis.dim is None or axis.offsets for axis in axes):
        return list(range(len(microbatches)))
    return [(each.size, each.columns and (each.columns.start, each.columns.stop)) for each in microbatches]


def _structure(value: Any) -> Any:
    """A key that is equal for batches that are split alike, unless values of tensors decide."""
    if isinstance(value, Tensor):
        # A nested tensor has no shape; `batch_size` refuses it.
        return Tensor if value.is_nested else value.shape
    parts = flatten_one_level(value)
    if parts is None and type(value) not in PLAIN_TYPES and register_containers(value):
        parts = flatten_one_level(value)
    if parts is None:
        return type(value)
    return parts.kind, parts.keys, tuple([_structure(item) for item in parts.items])


def microbatch_sizes(batch: int, num_microbatches: int) -> tuple[int, ...]:
    """The number of samples of each microbatch: equal to within one, larger ones first, none of them empty.

    `flat` and `pipelining` split the inputs and targets of hand-written stages into the same sizes.
    """
    if num_microbatches < 1:
        raise RunError("microbatches must be 1 or more", got=num_microbatches)
    least, more = divmod(batch, num_microbatches)
    return tuple(size for size in (least + (index < more) for index in range(num_microbatches)) if size)


def split_tensor(tensor: Tensor, lengths: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Consecutive parts of these lengths along a dimension, as views that can be written in place."""
    pairs = zip(accumulate(lengths, initial=0), lengths, strict=False)
    return [tensor.narrow(dim, start, length) for start, length in pairs]


def _sparse_parts(value: Tensor, name: str, lengths: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Parts of a sparse tensor, which are copies: it has no views."""
    if len(lengths) == 1:
        return [value]
    if value.layout is not torch.sparse_coo:
        raise RunError(
            "a sparse tensor must have the layout torch.sparse_coo to be split",
            argument=name,
            got=value.layout,
            hint=f"{name}.to_sparse_coo(), split={{{name!r}: None}} to pass it whole, or microbatches=1",
        )
    pairs = zip(accumulate(lengths, initial=0), lengths, strict=False)
    return [value.narrow_copy(dim, start, length) for start, length in pairs]


def _joined(values: Sequence[Any], name: str, axes: Mapping[str, SampleAxis]) -> Any:
    """The value of several microbatches together: whatever is split is concatenated."""
    axis, first = axes.get(name), values[0]
    if axis is None:
        parts = [flatten_one_level(value) for value in values]
        if parts[0] is None:
            return first
        columns = zip(*(each.items for each in parts if each is not None), strict=True)
        items = [_joined(column, f"{name}.{key}", axes) for key, column in zip(parts[0].keys, columns, strict=True)]
        return unflatten_one_level(parts[0].kind, parts[0].keys, items)
    if axis.dim is not None:
        return torch.cat(list(values), axis.dim)
    entries = [entry for value in values for entry in value]
    return unflatten_one_level(type(first), range(len(entries)), entries)


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
    split_prefixes = tuple(f"{name}." for name in first.axes)
    whole = [
        (name, tuple(leaf.shape))
        for name, leaf in named_inputs(forward, first.args, first.kwargs).items()
        if isinstance(leaf, Tensor)
        and leaf.dim()
        and (leaf.shape[0] > 1 or batch in leaf.shape)  # such as the first state of an LSTM: (1, batch, size)
        and not f"{name}.".startswith(split_prefixes)
    ]
    values, fix = dict(error.values), "microbatches=1"
    if whole:
        names = ", ".join(
            f"{name!r}: {shape.index(batch) if shape.count(batch) == 1 else '...'}" for name, shape in whole
        )
        values["passed_whole"] = ", ".join(f"{name} {shape}" for name, shape in whole)
        fix = f"split={{{names}}} to split these arguments too, or microbatches=1"
    values |= {"batch": batch, "microbatches": len(microbatches)}
    hint = f"{error.hint}; if it runs on the whole batch, {fix}"
    return CaptureError(error.problem, hint=hint, report=error.report, **values)
