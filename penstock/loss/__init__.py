"""How the losses and gradients of microbatches add up to those of the batch.

`LossWeights` is used by the runtime: it computes the losses of a loss function and finds the weight of each
microbatch. `probe.py` explains the identity that it rests on.

    weights.py        LossWeights: what is known of a loss from step to step, replicas, warnings
    decide.py         whether weights can be counted, must be evaluated in every step, or do not exist
    counts.py         weights that are the shares of samples, labels or a mask
    probe.py          compares gradients for some samples together with those for the same samples in parts
    samples.py        selects samples of a batch and makes outputs for them
    function.py       evaluates a loss function
    model.py          evaluates the loss that a model returns, without running its blocks
    added.py          add_loss; added_weights.py finds the weights of added losses
"""

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
