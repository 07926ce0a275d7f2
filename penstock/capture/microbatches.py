"""Splits the arguments and the target of a step into microbatches."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from typing import Any

from torch import Tensor

from penstock.errors import RunError
from penstock.ir import named_inputs, named_leaves, transform

Split = Mapping[str, int | None]
"""by the name of an argument or of a part of it: the dimension to split along, or None to pass it whole"""
Leaf = tuple[str, object]

_TARGET = "target"


@dataclass(frozen=True)
class Microbatch:
    """The arguments of the model and the target of the loss for some samples of a batch; tensors are views of it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    size: int
    """number of samples"""


def split_batch(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    num_microbatches: int,
    split: Split | None = None,
) -> tuple[Microbatch, ...]:
    """Split a batch into microbatches, larger ones first; into fewer if there are fewer samples.

    Tensors whose first dimension is the batch are split along it, everything else is passed whole to every microbatch.
    `split` overrides this by the name of a parameter of the forward, of `target`, or of a part of either
    (`batch.mask`). The size of the batch is that of the first tensor that `split` does not keep whole.
    """
    split = dict(split or {})
    # Stand-ins pass through the signature in place of the arguments, so that each gets its parameter's name. They are
    # no containers and are therefore never taken apart.
    slots = [_Slot(place) for place in (*range(len(args)), *kwargs)]
    named = named_inputs(forward, slots[: len(args)], dict(zip(kwargs, slots[len(args) :], strict=True)))
    names = {slot.place: name for name, slot in named.items()}
    arguments = {place: args[place] if isinstance(place, int) else kwargs[place] for place in names}
    leaves = {place: named_leaves(arguments[place], name) for place, name in names.items()}
    inputs = [leaf for place in names for leaf in leaves[place]]
    targets = named_leaves(target, _TARGET)
    _check_split(split, (*inputs, *targets), (*inspect.signature(forward).parameters, _TARGET))

    batch = _batch_size(inputs, split)
    sizes = microbatch_sizes(batch, num_microbatches)
    spans = list(zip(accumulate(sizes, initial=0), sizes, strict=False))
    columns = {
        place: _parts(arguments[place], [_split_dim(name, leaf, batch, split) for name, leaf in leaves[place]], spans)
        for place in (*range(len(args)), *kwargs)
    }
    target_column = _parts(target, [_target_dim(name, leaf, batch, split) for name, leaf in targets], spans)
    return tuple(
        Microbatch(
            tuple(columns[place][index] for place in range(len(args))),
            {key: columns[key][index] for key in kwargs},
            target_column[index],
            size,
        )
        for index, size in enumerate(sizes)
    )


def microbatch_sizes(batch: int, num_microbatches: int) -> tuple[int, ...]:
    """The number of samples of each microbatch: equal to within one, larger ones first, none of them empty."""
    if num_microbatches < 1:
        raise RunError("a step needs at least one microbatch", microbatches=num_microbatches)
    least, more = divmod(batch, num_microbatches)
    return tuple(size for size in (least + (place < more) for place in range(num_microbatches)) if size)


class _Slot:
    """Placeholder for the argument at a position or keyword of the call."""

    def __init__(self, place: int | str) -> None:
        self.place = place


def _parts(thing: object, dims: Sequence[int | None], spans: Sequence[tuple[int, int]]) -> list[Any]:
    """The structure for every microbatch, each leaf narrowed along its dimension if it has one."""

    def narrowed(leaf: object, dim: int | None, span: tuple[int, int]) -> object:
        return leaf.narrow(dim, *span) if isinstance(leaf, Tensor) and dim is not None else leaf

    if isinstance(thing, Tensor):
        # Most arguments are plain tensors: no walk over a structure for each microbatch.
        return [narrowed(thing, dims[0], span) for span in spans]
    found = []
    for span in spans:
        own = iter(dims)
        found.append(transform(thing, lambda leaf, own=own, span=span: narrowed(leaf, next(own), span)))  # type: ignore[misc]
    return found


def _override(name: str, split: Split) -> str | None:
    """The entry of `split` for a leaf: its own, else that of the closest container around it."""
    words = name.split(".")
    return next((key for end in range(len(words), 0, -1) if (key := ".".join(words[:end])) in split), None)


def _check_split(split: Split, found: Sequence[Leaf], parameters: Sequence[str]) -> None:
    """Refuse names that match nothing. A parameter that this step leaves out may be used in another step."""
    names = {name for name, _ in found}
    for name, dim in split.items():
        if name not in (*names, *parameters) and not any(leaf.startswith(f"{name}.") for leaf in names):
            known = [leaf for leaf, thing in found if isinstance(thing, Tensor)]
            close = get_close_matches(name, known, n=1)
            hint = f"{close[0]!r}" if close else f"one of {', '.join(known) or 'none'}"
            raise RunError("split must name an argument of this step", name=repr(name), hint=hint)
        if not (dim is None or type(dim) is int):
            raise RunError("the values of split must be a dimension or None", name=repr(name), given=repr(dim))


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
        "the size of the batch is unknown: no argument is a tensor that can be split",
        arguments=[name for name, _ in inputs],
        hint="give the model at least one tensor whose first dimension is the batch",
    )


def _checked_dim(name: str, leaf: Tensor, dim: int) -> int:
    if not -leaf.dim() <= dim < leaf.dim():
        raise RunError("split must give a dimension of the tensor", name=name, dim=dim, shape=tuple(leaf.shape))
    return dim % leaf.dim()


def _split_dim(name: str, leaf: object, batch: int, split: Split) -> int | None:
    """The dimension along which a leaf is split; None: it is passed whole."""
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
    """As for an argument, but a target that is not split is almost always a mistake, so it must be requested."""
    dim = _split_dim(name, leaf, batch, split)
    if dim is None and isinstance(leaf, Tensor) and leaf.dim() and _override(name, split) is None:
        raise RunError(
            "the first dimension of a target is not the batch",
            target=name,
            shape=tuple(leaf.shape),
            batch=batch,
            hint=f"split={{{name!r}: dim}} if another dimension is the batch, {{{name!r}: None}} to pass it whole",
        )
    return dim
