"""How the losses and gradients of microbatches add up to those of the batch.

`LossWeights` is used by the runtime: it computes the losses of a loss function and finds the weight of each
microbatch. `probe.py` explains the identity that it rests on.

    microbatch_weights.py  LossWeights: the weights of every step, and warnings; replicas.py: weights among all replicas
    find_weights.py        whether weights can be counted, must be evaluated in every step, or do not exist
    reductions.py          mean, tokens and sum: weights that are the shares of samples, labels or a mask
    probe.py               compares gradients for some samples together with those for the same samples in parts
    samples.py             selects samples of a batch and makes outputs for them
    find_losses.py         finds the losses in the result of a model or a loss function, and checks their types
    loss_function.py       evaluates a loss function
    returned_loss.py       evaluates the loss that a model returns, with noise in place of the results of its blocks
    interactions.py        finds samples that interact inside a model
    add_loss.py            add_loss; added_weights.py finds the weights of added losses
"""

from penstock.loss.add_loss import ADDED_COLLECTOR, Added, add_loss, added_losses, collect_added
from penstock.loss.added_weights import AddedLosses
from penstock.loss.find_losses import SINGLE, check_loss, loss_values, losses_of, losses_of_function, no_gradient_error
from penstock.loss.loss_function import has_parameters, loss_module
from penstock.loss.microbatch_weights import LossStep, LossWeights
from penstock.loss.probe import FunctionTracker
from penstock.loss.reductions import REDUCTIONS, weighted_sum
from penstock.loss.replicas import agree_on_names
