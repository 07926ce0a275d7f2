"""Batch: cuts the arguments of a step into microbatches."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

from torch import Tensor

from penstock.errors import RunError
from penstock.ir.containers import named_inputs, named_leaves, transform

Split = Mapping[str, int | None]
Leaf = tuple[str, object]

_TARGET = "target"


@dataclass(frozen=True)
class Microbatch:
    """What the model and the loss are given for some of the samples; tensors are views of the batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int
    """its samples"""


class _Slot:
    """Stands for one argument while the signature says what it is called; no container, so never taken apart."""

    def __init__(self, place: int | str) -> None:
        self.place = place


def cut(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    num_microbatches: int,
    split: Split | None = None,
) -> tuple[Microbatch, ...]:
    """The microbatches of a batch: fewer than asked for when there are fewer samples, the larger ones first.

    Tensors whose first dimension is the batch are cut along it, all else is given whole to every microbatch. `split`
    overrides by the name of a parameter of the forward, of `target`, or of a part of either (`batch.mask`): the
    dimension to cut along, or None for whole. The first tensor that is not overridden by None says how large the
    batch is.
    """
    split = dict(split or {})
    names = _argument_names(forward, args, kwargs)
    inputs = [leaf for place in names for leaf in _leaves_at(args, kwargs, place, names)]
    targets = named_leaves(target, _TARGET)
    _check_split(split, (*inputs, *targets), (*inspect.signature(forward).parameters, _TARGET))
    batch = _batch_size(inputs, split)
    dims = {name: _input_dim(name, leaf, batch, split) for name, leaf in inputs}
    target_dims = {name: _target_dim(name, leaf, batch, split) for name, leaf in targets}
    spans = _spans(batch, num_microbatches)
    columns = [
        _parts(_at(args, kwargs, place), [dims[leaf] for leaf, _ in _leaves_at(args, kwargs, place, names)], spans)
        for place in (*range(len(args)), *kwargs)
    ]
    targets_of = _parts(target, [target_dims[name] for name, _ in targets], spans)
    rows = zip(*columns, strict=True) if columns else [()] * len(spans)
    return tuple(
        Microbatch(tuple(row[: len(args)]), dict(zip(kwargs, row[len(args) :], strict=True)), own, size)
        for row, own, (_, size) in zip(rows, targets_of, spans, strict=True)
    )


def sizes_of(batch: int, num_microbatches: int) -> tuple[int, ...]:
    """The samples of each microbatch: alike to within one, the larger ones first, none of them empty."""
    if num_microbatches < 1:
        raise RunError("a step needs at least one microbatch", microbatches=num_microbatches)
    least, more = divmod(batch, num_microbatches)
    return tuple(size for size in (least + (place < more) for place in range(num_microbatches)) if size)


def _spans(batch: int, num_microbatches: int) -> list[tuple[int, int]]:
    sizes = sizes_of(batch, num_microbatches)
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _argument_names(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[int | str, str]:
    """The name of every argument, in the order of the signature, by its position or keyword in the call."""
    slots = named_inputs(forward, [_Slot(place) for place in range(len(args))], {key: _Slot(key) for key in kwargs})
    return {slot.place: name for name, slot in slots.items()}


def _at(args: Sequence[Any], kwargs: Mapping[str, Any], place: int | str) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]


def _leaves_at(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int | str, names: Mapping[int | str, str]
) -> list[Leaf]:
    return named_leaves(_at(args, kwargs, place), names[place])


def _parts(thing: object, dims: Sequence[int | None], spans: Sequence[tuple[int, int]]) -> list[Any]:
    """The structure for every microbatch, with every leaf that has a dimension narrowed along it."""
    if isinstance(thing, Tensor):
        return [_narrowed(thing, dims[0], span) for span in spans]
    return [_part(thing, iter(dims), span) for span in spans]


def _part(thing: object, dims: Iterator[int | None], span: tuple[int, int]) -> Any:
    return transform(thing, lambda leaf: _narrowed(leaf, next(dims), span))


def _narrowed(leaf: object, dim: int | None, span: tuple[int, int]) -> object:
    return leaf.narrow(dim, *span) if isinstance(leaf, Tensor) and dim is not None else leaf


def _override(name: str, split: Split) -> str | None:
    """The entry of `split` for a leaf: its own, else that of the closest container around it."""
    words = name.split(".")
    return next((key for end in range(len(words), 0, -1) if (key := ".".join(words[:end])) in split), None)


def _check_split(split: Split, found: Sequence[Leaf], parameters: Sequence[str]) -> None:
    """Refuse an entry that can never mean anything; that of a parameter left out in this step waits for another."""
    names = {name for name, _ in found}
    for name, dim in split.items():
        if name not in (*names, *parameters) and not any(leaf.startswith(f"{name}.") for leaf in names):
            known = [leaf for leaf, thing in found if isinstance(thing, Tensor)]
            close = get_close_matches(name, known, n=1)
            hint = f"{close[0]!r}" if close else f"one of {', '.join(known) or 'none'}"
            raise RunError("split names no argument of this step", name=repr(name), hint=hint)
        if not (dim is None or type(dim) is int):
            raise RunError("split gives a dimension or None", name=repr(name), given=repr(dim))


def _batch_size(inputs: Sequence[Leaf], split: Split) -> int:
    for name, leaf in inputs:
        key = _override(name, split)
        dim = 0 if key is None else split[key]
        if isinstance(leaf, Tensor) and dim is not None and leaf.dim():
            size = int(leaf.shape[_checked_dim(name, leaf, dim)])
            if not size:
                raise RunError("the batch is empty", argument=name, shape=tuple(leaf.shape))
            return size
    raise RunError(
        "no tensor among the arguments says how large the batch is",
        arguments=[name for name, _ in inputs],
        hint="give the model at least one tensor whose first dimension is the batch",
    )


def _checked_dim(name: str, leaf: Tensor, dim: int) -> int:
    if not -leaf.dim() <= dim < leaf.dim():
        raise RunError("split names a dimension that the tensor lacks", name=name, dim=dim, shape=tuple(leaf.shape))
    return dim % leaf.dim()


def _input_dim(name: str, leaf: object, batch: int, split: Split) -> int | None:
    """The dimension along which a leaf is cut; None: it is given whole."""
    if not isinstance(leaf, Tensor):
        return None
    key = _override(name, split)
    if key is None:
        return 0 if leaf.dim() and leaf.shape[0] == batch else None
    asked = split[key]
    if asked is None:
        return None
    dim = _checked_dim(name, leaf, asked)
    if leaf.shape[dim] != batch:
        raise RunError(
            "a tensor cannot be split along this dimension: it is not as long as the batch",
            name=name,
            dim=asked,
            shape=tuple(leaf.shape),
            batch=batch,
        )
    return dim


def _target_dim(name: str, leaf: object, batch: int, split: Split) -> int | None:
    dim = _input_dim(name, leaf, batch, split)
    if dim is None and isinstance(leaf, Tensor) and leaf.dim() and _override(name, split) is None:
        raise RunError(
            "the first dimension of a target is not the batch",
            target=name,
            shape=tuple(leaf.shape),
            batch=batch,
            hint=f"split={{{name!r}: dim}} if another dimension is the batch, {{{name!r}: None}} to give it whole",
        )
    return dim
