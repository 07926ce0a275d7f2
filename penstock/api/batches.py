"""Batches: what a data function hands out, as the arguments of a step."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import RunError

_PAIR = "yield inputs, target"


class StepCall(NamedTuple):
    """What a step is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None


def step_call(batch: Any, has_loss_fn: bool) -> StepCall:
    """A batch in any usual form: with a loss function (inputs, target), else the inputs alone.

    Inputs are one tensor, a tuple of arguments, or a mapping of arguments by name.
    """
    if not has_loss_fn:
        return StepCall(*_inputs(batch))
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
        raise RunError("a loss function needs batches of inputs and a target", batch=got, hint=_PAIR)
    inputs, target = batch
    return StepCall(*_inputs(inputs), target)


def _inputs(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        if names := [key for key in given if not isinstance(key, str)]:
            raise RunError("a batch by name needs names that are text", names=names[:3])
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


def size_of(call: StepCall) -> tuple[int, int]:
    """The samples of a batch, and its tokens: 0 where its inputs are not whole numbers in rows."""
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        return 0, 0
    first = tensors[0]
    is_text = first.dim() == 2 and not (first.is_floating_point() or first.is_complex())
    return len(first), first.numel() if is_text else 0
