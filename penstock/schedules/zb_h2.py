"""zb_h1 with a warm-up twice as long; no bubble between a rank's first and last pass at F = I = W.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism". Choose it when twice the activations of 1f1b fit: 2 ranks - 1
microbatches.

For 4 ranks and 7 microbatches:

    rank 0 | F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .  .  .
    rank 1 | .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .  .
    rank 2 | .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 .
    rank 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6
"""

from dataclasses import dataclass

from penstock.ir import Schedule
from penstock.schedules.base import Scheduler
from penstock.schedules.zb_h1 import split_1f1b


@dataclass(frozen=True)
class ZBH2(Scheduler):
    """One stage per rank; rank r delays its weight gradients by 2 r."""

    name = "zb_h2"
    allowed_stages_per_rank = (1,)
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        return split_1f1b(ranks, microbatches, pace=2)
