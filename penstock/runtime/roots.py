"""The values of a captured model that a backward starts from."""

from penstock.capture import Captured
from penstock.errors import RunError
from penstock.loss import added_losses, loss_name
from penstock.measure import MeasuredModel


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


def measured_model(captured: Captured, has_loss_fn: bool = False) -> MeasuredModel:
    """The model to be measured, trained as a plan with or without a loss function would train it."""
    return MeasuredModel(captured, roots_of(captured, has_loss_fn), added_losses)
