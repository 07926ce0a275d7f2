"""Losses that modules inside a model add to the loss of its output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from penstock.errors import RunError
from penstock.ir import choices_text
from penstock.loss.reduction_weights import SAMPLE_REDUCTIONS


class Added(NamedTuple):
    """A loss that was added, and the reduction that the user gave for it."""

    value: Tensor
    reduction: str | None = None


Collect = Callable[[Added], object]
ADDED_COLLECTOR: ContextVar[Collect | None] = ContextVar("penstock_added_losses", default=None)
"""called with every loss that is added; None: losses are not collected"""


def add_loss(value: Tensor, reduction: str | None = None) -> None:
    """Add a scalar to the loss from inside a module's forward, such as a penalty or a router's balance loss.

    A Pipeline weights it so that loss and gradients equal those of one process: a mean over samples by the share of
    each microbatch in the samples, a sum over samples by 1; a penalty on parameters is counted once. Outside of a
    Pipeline this is a no-op, unless `added_losses` collects.

    Args:
        value: a tensor of one floating-point number
        reduction: "mean" or "sum" over samples; None: detected by evaluating the loss on parts of a microbatch

    Raises:
        RunError: if the value is not one number, or the reduction is unknown
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise RunError("an added loss must be one number in a tensor", got=got, hint="(0.01 * x.square()).mean()")
    if reduction is not None and reduction not in SAMPLE_REDUCTIONS:
        problem = f"the reduction of an added loss must be {choices_text((*SAMPLE_REDUCTIONS, None))}"
        raise RunError(problem, got=repr(reduction), hint="add_loss(value), which detects it")
    if has_torch_function_unary(value):
        handle_torch_function(added_loss, (value,), value, reduction)
    else:
        added_loss(value, reduction)


def added_loss(value: Tensor, reduction: str | None = None) -> Tensor:
    """Collect a loss. Recorded like any torch function between blocks, so that it runs again in its stage."""
    collect = ADDED_COLLECTOR.get()
    if collect is not None:
        collect(Added(value, reduction))
    return value.clone()


@contextmanager
def collect_added(collect: Collect) -> Iterator[None]:
    """Call `collect` with every loss that is added inside: `added = []; with collect_added(added.append): ...`."""
    token = ADDED_COLLECTOR.set(collect)
    try:
        yield
    finally:
        ADDED_COLLECTOR.reset(token)


@contextmanager
def added_losses() -> Iterator[list[Tensor]]:
    """Collect the losses added inside: `with added_losses() as extra: ...; loss = loss + sum(extra)`.

    Returns:
        A context manager that gives the list of losses.

    Raises:
        RunError: by `add_loss` inside, for a value that is not one number
    """
    values: list[Tensor] = []
    with collect_added(lambda added: values.append(added.value)):
        yield values
