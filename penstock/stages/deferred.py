"""Deferred: a weight gradient put off, kept as what it is computed from."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Weights = tuple[Tensor, ...]
Compute = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

_ANCHOR = torch.zeros(0, requires_grad=True)
"""makes the result of a function need a gradient though none of its arguments does"""


class Deferred:
    """The gradients of some weights by one call: `compute(value, gradient)`, the value that the call was given and
    the gradient of its result, in the order of `weights`. It joins the queue when that gradient arrives.
    """

    __slots__ = ("_compute", "_gradient", "_queue", "_value", "_version", "weights")

    def __init__(self, queue: "list[Deferred]", weights: Weights, compute: Compute) -> None:
        self.weights = weights
        self._queue, self._compute = queue, compute

    def keep(self, value: Tensor) -> None:
        """Keep the value that the call was given; nobody may write into it from now on."""
        self._value, self._version = value, value._version

    def arrive(self, gradients: tuple[Tensor | None, ...]) -> None:
        """The gradient of the result is known."""
        if gradients[0] is not None:
            self._gradient = gradients[0]
            self._queue.append(self)

    def forget(self) -> None:
        """Let go of what the gradients were computed from."""
        del self._value, self._gradient

    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients of the weights."""
        if self._value._version != self._version:
            raise RuntimeError(
                "a tensor needed for a weight gradient has been written in place: it is at version "
                f"{self._value._version}, expected version {self._version}"
            )
        return self._compute(self._value, self._gradient)


class Begun(Function):
    """The result of a call that nothing but its parameters gives a gradient to."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, result: list[Tensor], value: Tensor, deferred: Deferred) -> Tensor:
        """The result comes in a list, as an argument would not be let out as it is."""
        ctx.deferred = deferred
        ctx.save_for_backward(value)
        return result[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        _arrived(ctx, gradient)
        return None, None, None, None


class Kept(Function):
    """A result whose call saves the value it was given as autograd's own functions do, so that it may be recomputed."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, value: Tensor, deferred: Deferred) -> Tensor:
        """The same tensor; it may be written in place, as the result of the call might have been."""
        ctx.deferred = deferred
        ctx.mark_dirty(result)
        ctx.save_for_backward(value)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _arrived(ctx, gradient)
        return gradient, None, None


def begun(result: Tensor, value: Tensor, deferred: Deferred) -> Tensor:
    """The result, needing a gradient."""
    made: Tensor = Begun.apply(_ANCHOR, [result], value, deferred)  # type: ignore[no-untyped-call]
    return made


def kept(result: Tensor, value: Tensor, deferred: Deferred) -> Tensor:
    """The result, with a value that is saved as autograd saves."""
    made: Tensor = Kept.apply(result, value, deferred)  # type: ignore[no-untyped-call]
    return made


def _arrived(ctx: Any, gradient: Tensor) -> None:
    (value,) = ctx.saved_tensors
    ctx.deferred.keep(value)
    ctx.deferred.arrive((gradient,))
