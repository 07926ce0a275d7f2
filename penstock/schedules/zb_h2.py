"""zb_h2: zb_h1 with a warm-up twice as long; no bubble between a rank's first and last pass at F = I = W.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism". Choose it when twice the activations of 1f1b fit: 2 ranks - 1
microbatches.
"""

from dataclasses import dataclass

from penstock.ir.schedule import Schedule
from penstock.schedules.base import Scheduler
from penstock.schedules.split_1f1b import split_1f1b


@dataclass(frozen=True)
class ZBH2(Scheduler):
    """One stage per rank; rank r delays its weight gradients by 2 r."""

    name = "zb_h2"
    choices = (1,)
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        return split_1f1b(ranks, microbatches, pace=2)
