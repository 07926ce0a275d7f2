"""MECHANISM: live Graph + Partition -> Stages, and their run one after another in one process."""

from penstock.stages.check import check
from penstock.stages.decisions import check_guards
from penstock.stages.distances import distances
from penstock.stages.flat import Flat
from penstock.stages.grad_boundary import grad_boundary
from penstock.stages.materialise import materialise
from penstock.stages.ownership import Ownership
from penstock.stages.release import Release
from penstock.stages.sequence import Sequence, split
from penstock.stages.stage import Stage
from penstock.stages.stage_run import StageRun

__all__ = [
    "Flat",
    "Ownership",
    "Release",
    "Sequence",
    "Stage",
    "StageRun",
    "check",
    "check_guards",
    "distances",
    "grad_boundary",
    "materialise",
    "split",
]
