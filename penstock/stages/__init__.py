"""Stages of a partition as modules, and one forward and backward of a stage.

    split(captured, partition) --> Stages; StageRun(stage, recording, inputs, incoming) --> outputs, gradients

The files, in the order in which to read them:

    stage.py               a stage as a module with the model's own names
    ownership.py           which stage owns each module, parameter and buffer, and which ranks use it
    cut_checks.py          refuses cuts that would change results
    stage_run.py           one forward and backward of a stage, between two gradient boundaries
    recompute.py           blocks that run again in backward instead of saving activations
    deferral.py            a split backward: defers weight gradients
    deferred_functions.py  the torch functions whose weight gradients can be deferred
    sequence.py            all stages in one process, one after another; check.py compares them with the model
    layer_list.py          a model given as a list of modules and functions
"""

from penstock.stages.check import check, distances
from penstock.stages.cut_checks import check_guards
from penstock.stages.deferral import DeferredAccumulator
from penstock.stages.layer_list import LayerList
from penstock.stages.ownership import Ownership, parameter_ranks
from penstock.stages.sequence import StageSequence, add_gradient, split
from penstock.stages.stage import PartitionedModel, Stage
from penstock.stages.stage_run import ForwardRun, StageRun
