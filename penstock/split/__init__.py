"""MECHANISM: live Graph + Partition -> Stages, and their run one after another in one process."""

from penstock.split.check import check
from penstock.split.flat import Flat
from penstock.split.materialise import materialise
from penstock.split.passage import Passage
from penstock.split.sequence import Sequence, split
from penstock.split.stage import Stage

__all__ = ["Flat", "Passage", "Sequence", "Stage", "check", "materialise", "split"]
