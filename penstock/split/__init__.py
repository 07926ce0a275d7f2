"""MECHANISM: live Graph + Partition -> Stages, and their run one after another in one process."""

from penstock.split.check import check
from penstock.split.sequence import Sequence, split
from penstock.split.stage import Passage, Stage

__all__ = ["Passage", "Sequence", "Stage", "check", "split"]
