"""Adding: losses that a module inside the model adds to the one of its output."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from penstock.errors import RunError

Collect = Callable[[Tensor, str | None], None]
_COLLECT: ContextVar[Collect | None] = ContextVar("penstock_added_losses", default=None)
REDUCTIONS = ("mean", "sum")


class Added(NamedTuple):
    """A loss that was added, and what the user says of how it is made of samples."""

    value: Tensor
    reduction: str | None = None


def add_loss(value: Tensor, reduction: str | None = None) -> None:
    """Add a number to the loss, from inside a module's forward: a penalty, a router's balance.

    Under a Pipeline its gradient and value count as in one process: a mean over samples by the samples of each
    microbatch, a sum over samples as it is, one of parameters alone once. Which of them it is shows in its graph;
    `reduction`, "mean" or "sum", says so. Elsewhere nothing is done, unless `added_losses` collects.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        given = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise RunError("add_loss takes one number, as a tensor", given=given, hint="(0.01 * x.square()).mean()")
    if reduction is not None and reduction not in REDUCTIONS:
        raise RunError("unknown reduction of an added loss", reduction=repr(reduction), hint='"mean", "sum" or None')
    if has_torch_function_unary(value):
        handle_torch_function(added_loss, (value,), value, reduction)
    else:
        added_loss(value, reduction)


def added_loss(value: Tensor, reduction: str | None = None) -> Tensor:
    """What is recorded between blocks, as any function of torch that makes a tensor, and so runs again in its stage."""
    collect = _COLLECT.get()
    if collect is not None:
        collect(value, reduction)
    return value.clone()


class added_losses:  # noqa: N801
    """Collect what `add_loss` is given inside: `with added_losses() as extra: ...; loss = loss + sum(extra)`."""

    __slots__ = ("_token",)

    def __enter__(self) -> list[Tensor]:
        collected: list[Tensor] = []
        self._token = _COLLECT.set(lambda value, reduction: collected.append(value))
        return collected

    def __exit__(self, *error: object) -> None:
        _COLLECT.reset(self._token)


class added_with_reductions:  # noqa: N801
    """Collect it together with what the user says of it."""

    __slots__ = ("_token",)

    def __enter__(self) -> list[Added]:
        collected: list[Added] = []
        self._token = _COLLECT.set(lambda value, reduction: collected.append(Added(value, reduction)))
        return collected

    def __exit__(self, *error: object) -> None:
        _COLLECT.reset(self._token)
