"""How the losses and gradients of microbatches add up to those of the batch."""

from penstock.loss.added import Added, add_loss, added_losses, added_with_reductions
from penstock.loss.added_weights import AddedLosses
from penstock.loss.counts import REDUCTIONS, weighted_sum
from penstock.loss.model import loss_name, loss_of
from penstock.loss.probe import FunctionTracker
from penstock.loss.weights import LossStep, LossWeights

__all__ = [
    "REDUCTIONS",
    "Added",
    "AddedLosses",
    "FunctionTracker",
    "LossStep",
    "LossWeights",
    "add_loss",
    "added_losses",
    "added_with_reductions",
    "loss_name",
    "loss_of",
    "weighted_sum",
]
