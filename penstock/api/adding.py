"""Adding: losses that a module inside the model adds to the one of its output."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

_COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("penstock_added_losses", default=None)


def add_loss(value: Tensor) -> None:
    """Add a scalar to the loss, from inside a module's forward: a penalty, a router's balance.

    Under a Pipeline its gradient and value count as in one process, each microbatch by its samples. Elsewhere it does
    nothing, unless `added_losses` collects.
    """
    # Between blocks it is recorded like any function of torch, and so runs again in its stage.
    if has_torch_function_unary(value):
        handle_torch_function(add_loss, (value,), value)
        return
    collected = _COLLECTED.get()
    if collected is not None:
        collected.append(value)


@contextmanager
def added_losses() -> Iterator[list[Tensor]]:
    """Collect what `add_loss` is given inside: `with added_losses() as extra: ...; loss = loss + sum(extra)`."""
    collected: list[Tensor] = []
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)
