"""MECHANISM: live Graph + Partition -> Stages, and their run one after another in one process."""

from penstock.stages.check import check
from penstock.stages.decisions import check_guards
from penstock.stages.distances import distances
from penstock.stages.entrance import enter
from penstock.stages.flat import Flat
from penstock.stages.materialise import materialise
from penstock.stages.ownership import Ownership
from penstock.stages.passage import Passage
from penstock.stages.release import Release
from penstock.stages.sequence import Sequence, split
from penstock.stages.stage import Stage

__all__ = [
    "Flat",
    "Ownership",
    "Passage",
    "Release",
    "Sequence",
    "Stage",
    "check",
    "check_guards",
    "distances",
    "enter",
    "materialise",
    "split",
]
