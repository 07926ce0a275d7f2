"""How the losses and gradients of microbatches add up to those of the batch.

`LossWeights` is used by the runtime: it computes the losses of a loss function and finds the weight of each
microbatch. `probe.py` explains the identity that it rests on.

    step_weights.py            LossWeights: the weights of the microbatches of every step, and warnings
    reduction_weights.py       mean, tokens and sum: the divisor of each, and the formula of the weights
    detect_reduction.py        which reduction a loss has; whether its weights are evaluated in every step, or not exact
    replicas.py                weights among the microbatches of all replicas
    probe.py                   compares gradients for some samples together with those for the same samples in parts
    samples.py                 selects samples of a batch and makes outputs for them
    find_losses.py             finds the losses in the result of a model or loss function
    loss_function.py           evaluates a loss function
    returned_loss.py           evaluates the loss that a model returns, with noise in place of the results of its blocks
    interactions.py            finds samples that interact inside a model
    add_loss.py                add_loss, with which modules add losses
    detect_added_reduction.py  AddedLosses: whether an added loss is a mean or a sum, and its weight
"""

from penstock.loss.add_loss import ADDED_COLLECTOR, Added, add_loss, added_losses, collect_added
from penstock.loss.detect_added_reduction import AddedLosses
from penstock.loss.find_losses import SINGLE, loss_values, losses_of, losses_of_function
from penstock.loss.loss_function import has_parameters, loss_module
from penstock.loss.probe import FunctionTracker
from penstock.loss.reduction_weights import REDUCTIONS, weighted_sum
from penstock.loss.replicas import agree_on_names
from penstock.loss.step_weights import LossStep, LossWeights
