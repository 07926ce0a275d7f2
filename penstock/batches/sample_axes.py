"""Finds where the samples of a batch are in the arguments of a call and in the target.

Each tensor, and each list with an entry per sample, gets a `SampleAxis`, by a rule of `split` or by its shape:

    batch_size          the number of samples, from the first argument that shows it
    SampleAxisFinder    the axes of all arguments, for this number of samples
"""

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.capture import tensors_in
from penstock.errors import RunError
from penstock.ir import (
    SPLIT_HINT,
    Ragged,
    Rows,
    SplitRule,
    flatten_one_level,
    is_split_rule,
    named_leaves,
)

Split = Mapping[str, SplitRule]
"""how to split, by the name of an argument or of a part of it (`batch.mask`)"""

TARGET = "target"
"""the name of the target in `split`, and the keyword argument of `Pipeline.step`"""
_NO_RULE: Any = object()
"""`split` does not name an argument; its entry None would mean that the argument is passed whole"""


@dataclass(frozen=True)
class SampleAxis:
    """Where the samples of a batch are in one of its tensors, or in a list with an entry per sample."""

    dim: int | None
    """the dimension that holds the samples; None for a list"""
    rows: int = 1
    """the number of rows of each sample along that dimension"""
    offsets: tuple[int, ...] = ()
    """if the number of rows varies, instead of `rows`: the first row of every sample, and the end of the last"""
    sizes: str = ""
    """the name of the argument that the offsets were read from"""

    def within(self, start: int, length: int) -> "SampleAxis":
        """The axis of the part that holds some of the samples."""
        if not self.offsets:
            return self
        offsets = self.offsets[start : start + length + 1]
        return replace(self, offsets=tuple(offset - offsets[0] for offset in offsets))


# Arguments by name


class Argument(NamedTuple):
    """An argument, or a part of one, with its name as in `split`."""

    name: str
    value: Any

    def items(self) -> list["Argument"]:
        """The items of a container."""
        parts = flatten_one_level(self.value)
        if parts is None:
            return []
        return [Argument(f"{self.name}.{key}", item) for key, item in zip(parts.keys, parts.items, strict=True)]

    @property
    def is_list(self) -> bool:
        """Whether it may have one entry per sample: a list or tuple, but not a named tuple, whose fields differ."""
        return (
            isinstance(self.value, list | tuple)
            and not hasattr(self.value, "_fields")
            and not isinstance(self.value, torch.Size)
        )


def _rule(name: str, split: Split) -> Any:
    """The entry of `split` for an argument or part of one: its own, else that of the closest container around it."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        key = ".".join(words[:end])
        if key in split:
            return split[key]
    return _NO_RULE


def has_rule(name: str, split: Split) -> bool:
    """Whether `split` has an entry for an argument or a container around it."""
    return _rule(name, split) is not _NO_RULE


def check_split_of_step(split: Split, arguments: Sequence[Argument], parameters: Mapping[str, Any]) -> None:
    """Raise a RunError for a value of `split` that is not a rule, or a name that is not an argument of this step.

    A parameter that this step leaves out, or passes as None, may be used in another step, and so may its parts.
    """
    values = {argument.name: argument.value for argument in arguments}
    for name, rule in split.items():
        if not is_split_rule(rule):
            raise RunError("a value of split must be a rule", name=repr(name), got=repr(rule), hint=SPLIT_HINT)
        root = name.split(".")[0]
        if name in parameters or name == TARGET or (root in (*parameters, TARGET) and values.get(root) is None):
            continue
        known = [leaf for argument in arguments for leaf in named_leaves(argument.value, argument.name)]
        if not any(f"{leaf}.".startswith(f"{name}.") for leaf, _ in known):
            tensors = [leaf for leaf, value in known if isinstance(value, Tensor)]
            close = get_close_matches(name, tensors, n=1)
            hint = f"{close[0]!r}" if close else f"one of {', '.join(tensors) or 'none'}"
            raise RunError("split must name an argument of this step", name=repr(name), hint=hint)


# The size of the batch


def batch_size(arguments: Sequence[Argument], split: Split) -> int:
    """The number of samples, from the first argument that is split by a dimension, by rows or by entries."""
    for argument in arguments:
        for size, name, value in _sizes(argument, split):
            if not size:
                raise RunError("the batch is empty", argument=name, shape=_shape(value))
            return size
    raise RunError(
        "the size of the batch is unknown: no argument is a tensor that can be split",
        arguments=[leaf for argument in arguments for leaf, _ in named_leaves(argument.value, argument.name)],
        hint="give the model at least one tensor whose first dimension is the batch",
    )


def _sizes(argument: Argument, split: Split) -> Iterator[tuple[int, str, Any]]:
    """The numbers of samples that the parts of an argument show, each with the name and value of the part.

    Parts that are passed whole, and ragged ones, show nothing.
    """
    name, value = argument
    rule = _rule(name, split)
    if isinstance(value, Tensor) and value.is_nested:
        hint = "a padded tensor, and a mask or the lengths of the samples"
        raise RunError("a nested tensor cannot be split into microbatches", argument=name, hint=hint)
    if rule == "samples" and argument.is_list:
        yield len(value), name, value
    elif isinstance(value, Tensor):
        if rule is _NO_RULE or rule == "items":
            if value.dim():
                yield int(value.shape[0]), name, value
        elif type(rule) is int:
            yield int(value.shape[_checked_dim(name, value, rule)]), name, value
        elif isinstance(rule, Rows) and rule.per_sample:
            length = int(value.shape[_checked_dim(name, value, rule.dim)])
            if length % rule.per_sample:
                raise _unfit(name, value, f"a multiple of {rule.per_sample} rows")
            yield length // rule.per_sample, name, value
    else:
        for item in argument.items():
            yield from _sizes(item, split)


# Axes


def is_of_target(name: str) -> bool:
    """Whether an argument or a part of one, by its name, is the target or a part of it."""
    return name.partition(".")[0] == TARGET


class SampleAxisFinder:
    """Finds the axes of one batch."""

    def __init__(self, num_samples: int, split: Split, is_unsplit: bool) -> None:
        """`is_unsplit`: there is one microbatch, so that ambiguous lists and targets are not refused."""
        self._num_samples, self._split, self._is_unsplit = num_samples, split, is_unsplit
        self._tensors: dict[str, Tensor] = {}
        """by name"""
        self._axes: dict[str, SampleAxis | None] = {}
        """those found so far, by name; None for an argument that is passed whole"""

    def find(self, arguments: Sequence[Argument]) -> dict[str, SampleAxis]:
        """The axes by name."""
        parts = [part for argument in arguments for part in self._split_parts(argument)]
        self._tensors = {name: value for name, value in parts if isinstance(value, Tensor)}
        self._axes = {name: SampleAxis(None) for name, _ in parts if name not in self._tensors}
        return {name: axis for name, _ in parts if (axis := self._axis_of(name)) is not None}

    def _split_parts(self, argument: Argument) -> Iterator[Argument]:
        """The parts of an argument that may have an axis: its tensors, and the lists that are split by entries."""
        name, value = argument
        if isinstance(value, Tensor):
            yield argument
            return
        rule = _rule(name, self._split)
        has_length = argument.is_list and len(value) == self._num_samples
        if rule == "samples" and not has_length:
            raise _unfit(name, value, f"a list or tuple of {self._num_samples} entries")
        if rule == "samples" or (rule is _NO_RULE and has_length and self._is_per_sample(argument)):
            yield argument
        else:
            for item in argument.items():
                yield from self._split_parts(item)

    def _is_per_sample(self, argument: Argument) -> bool:
        """Whether a list with as many entries as the batch has samples has one entry per sample.

        Raises an error if the list does not show it.
        """
        tensors = tensors_in(argument.value)
        is_batched = [leaf.dim() > 0 and leaf.shape[0] == self._num_samples for leaf in tensors]
        # Records are dicts, dataclasses and named tuples.
        kinds = [parts and parts.kind for parts in map(flatten_one_level, argument.value)]
        has_records = all(kind and (not issubclass(kind, list | tuple) or hasattr(kind, "_fields")) for kind in kinds)
        if not tensors or (all(is_batched) and not has_records):
            # Plain values, or a list of whole tensors, each of which has the batch as its first dimension.
            return False
        if not all(is_batched) and (has_records or is_of_target(argument.name)):
            # The labels of a detector: a dict of boxes for each sample.
            return True
        # Ambiguous: the number of boxes of a sample may happen to equal the number of samples, or only some tensors of
        # the list are as long as the batch.
        if self._is_unsplit:
            return False
        raise RunError(
            "a list or tuple with as many entries as the batch has samples may hold an entry for each sample, or whole "
            "tensors",
            argument=argument.name,
            entries=len(argument.value),
            batch=self._num_samples,
            hint=f'split={{{argument.name!r}: "samples"}}, or {{{argument.name!r}: "items"}} to split each item by its '
            "own shape",
        )

    def _axis_of(self, name: str) -> SampleAxis | None:
        """The axis of a tensor or list; None if it is passed whole."""
        if name not in self._axes:
            # A placeholder, so that Ragged sizes that refer to each other are refused instead of recursing without end.
            self._axes[name] = None
            self._axes[name] = self._tensor_axis(name, self._tensors[name], _rule(name, self._split))
        return self._axes[name]

    def _tensor_axis(self, name: str, tensor: Tensor, rule: Any) -> SampleAxis | None:
        num_samples = self._num_samples
        if rule is None:
            return None
        if rule is _NO_RULE or rule == "items":
            if tensor.dim() > 0 and tensor.shape[0] == num_samples:
                return SampleAxis(0)
            # An argument without the batch as its first dimension may be a table for all samples, but a target must
            # have an entry for each of them.
            if tensor.dim() and is_of_target(name) and not self._is_unsplit:
                hints = [f"split={{{name!r}: dim}} if another dimension is the batch", "None to pass it whole"]
                if len(tensor) % num_samples == 0:
                    hints.append(f"penstock.Rows({len(tensor) // num_samples}) if each sample has that number of rows")
                raise RunError(
                    "the first dimension of a target must be the batch",
                    target=name,
                    shape=tuple(tensor.shape),
                    batch=num_samples,
                    hint=", ".join(hints),
                )
            return None
        if rule == "samples":
            raise _unfit(name, tensor, f"a list or tuple of {num_samples} entries")
        if isinstance(rule, Ragged):
            return self._ragged_axis(name, rule)
        rows = rule if isinstance(rule, Rows) else Rows(1, rule)
        dim = _checked_dim(name, tensor, rows.dim)
        length = int(tensor.shape[dim])
        # Rows(None): any number of rows, the same for each sample.
        if length != num_samples * (rows.per_sample or length // num_samples):
            each = f"{rows.per_sample} * " if rows.per_sample not in (1, None) else ""
            wanted = f"a multiple of the {num_samples}" if rows.per_sample is None else f"{each}{num_samples}"
            raise _unfit(name, tensor, f"{wanted} samples along dimension {dim}")
        return SampleAxis(dim, length // num_samples)

    def _ragged_axis(self, name: str, rule: Ragged) -> SampleAxis:
        """The axis of a tensor whose number of rows per sample is read from another argument."""
        tensor = self._tensors[name]
        if rule.sizes not in self._tensors:
            known = ", ".join(other for other in self._tensors if other != name) or "none"
            raise RunError(
                "Ragged must name an argument that is a tensor", name=name, sizes=rule.sizes, hint=f"one of {known}"
            )
        sizes, axis = self._tensors[rule.sizes], self._axis_of(rule.sizes)
        if axis is None or axis.dim is None or (rule.token is None and axis.dim != 0):
            raise RunError(
                "the sizes of a ragged argument must be split by samples",
                name=name,
                sizes=rule.sizes,
                shape=tuple(sizes.shape),
                hint=f"split={{{rule.sizes!r}: ...}} that splits it, or another argument for {name!r}",
            )
        if sizes.is_meta:
            raise RunError("sizes on the meta device have no values", name=name, sizes=rule.sizes)
        # The number of rows that each entry of `sizes` stands for: one for every occurrence of the token, or the
        # product of its columns, such as height and width.
        if rule.token is not None:
            rows = (sizes == rule.token).movedim(axis.dim, 0).reshape(sizes.shape[axis.dim], -1).sum(1)
        else:
            rows = sizes.reshape(len(sizes), -1).prod(1)
        ends = list(accumulate(map(int, rows.tolist()), initial=0))
        # `sizes` may itself have several entries for each sample, as for several images: take the ends of samples only.
        starts = axis.offsets or range(0, self._num_samples * axis.rows + 1, axis.rows)
        dim = _checked_dim(name, tensor, rule.dim)
        if ends[-1] != tensor.shape[dim] or any(end < start for start, end in pairwise(ends)):
            raise RunError(
                "the sizes of a ragged argument must add up to its rows",
                name=name,
                shape=tuple(tensor.shape),
                sizes=rule.sizes,
                sum=ends[-1],
            )
        return SampleAxis(dim, offsets=tuple(ends[start] for start in starts), sizes=rule.sizes)


def _checked_dim(name: str, leaf: Tensor, dim: int) -> int:
    if not -leaf.dim() <= dim < leaf.dim():
        raise RunError("split must give a dimension of the tensor", name=name, dim=dim, shape=tuple(leaf.shape))
    return dim % leaf.dim()


def _unfit(name: str, value: Any, wanted: str) -> RunError:
    return RunError(f"an argument must have {wanted} to be split as given", name=name, got=_shape(value))


def _shape(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, Sized) else type(value).__name__
