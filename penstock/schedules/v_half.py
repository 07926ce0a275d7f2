"""v_half: a V schedule with half the activations of 1f1b.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory". Choose it when 1f1b's activations do not fit: at most
(ranks + 2) // 2 microbatches are held, for a bubble between those of v_min and zbv.
"""

from dataclasses import dataclass

from penstock.ir.costs import StageCosts
from penstock.ir.schedule import Schedule
from penstock.schedules.base import Scheduler
from penstock.schedules.vee_blocks import Block, repeat_block
from penstock.schedules.weights import refill


@dataclass(frozen=True)
class VHalf(Scheduler):
    """Exactly two stages per rank, placed as a V."""

    stages_per_rank: int = 2
    name = "v_half"
    choices = (2,)
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        # The pauses keep the four passes of a rank on different remainders by six for every rank.
        pauses = (0, 0, 1) if ranks % 2 else (0, 3, 1)
        repeated = repeat_block(Block(2, 1, 2, 1, pauses), ranks, microbatches)
        # Warm-up and cool-down of the repeated block leave gaps that weight gradients fill.
        return refill(repeated, StageCosts.uniform(2 * ranks))
