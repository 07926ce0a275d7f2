"""Stages of a partition as modules, and one forward and backward of a stage.

    split(captured, partition) --> Stages; StageRun(stage, recording, inputs, incoming) --> outputs, gradients

`StageRun` runs a stage between two gradient boundaries. If a schedule splits backward, weight gradients are deferred
(`deferral.py`, `deferred_functions.py`). `Sequence` and `check` run all stages in one process.
"""

from penstock.stages.check import check, distances
from penstock.stages.cut_checks import check_guards
from penstock.stages.deferral import DeferredAccumulator
from penstock.stages.layer_list import LayerList
from penstock.stages.ownership import Ownership
from penstock.stages.sequence import Sequence, split
from penstock.stages.stage import CutModel, Stage
from penstock.stages.stage_run import ForwardRun, StageRun, grad_boundary

__all__ = [
    "CutModel",
    "DeferredAccumulator",
    "ForwardRun",
    "LayerList",
    "Ownership",
    "Sequence",
    "Stage",
    "StageRun",
    "check",
    "check_guards",
    "distances",
    "grad_boundary",
    "split",
]
