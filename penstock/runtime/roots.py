"""Roots: the values of a captured model that a backward starts from."""

from penstock.capture import Captured
from penstock.errors import RunError
from penstock.runtime.losses.loss_value import loss_name


def roots_of(captured: Captured, has_loss_fn: bool) -> tuple[str, ...]:
    """The loss that the model returns; all outputs if a loss function takes them.

    A model that returns no loss will be given a loss function later.
    """
    if has_loss_fn:
        return captured.graph.outputs
    try:
        return (loss_name(captured.first),)
    except RunError:
        return captured.graph.outputs
