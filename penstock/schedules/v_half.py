"""A V schedule with half the activations of 1f1b.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory". Choose it when 1f1b's activations do not fit: at most
(ranks + 2) // 2 microbatches are held, for a bubble between those of v_min and zbv.

For 3 ranks and 3 microbatches:

    rank 0 | 0F0 0F1 .   .   .   5F0 5I0 0F2 5W0 5F1 5I1 5W1 0I0 0W0 .   5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
    rank 1 | .   1F0 .   .   4F0 1F1 .   4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 .
    rank 2 | .   .   2F0 3F0 .   .   2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
"""

from dataclasses import dataclass

from penstock.ir import Schedule, StageCosts
from penstock.schedules.base import Scheduler
from penstock.schedules.vee_blocks import Block, repeat_block
from penstock.schedules.weight_filling import move_weight_grads


@dataclass(frozen=True)
class VHalf(Scheduler):
    """Exactly two stages per rank, placed as a V."""

    stages_per_rank: int = 2
    name = "v_half"
    allowed_stages_per_rank = (2,)
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        # The pauses keep the four passes of a rank on different remainders modulo six for every rank.
        pauses = (0, 0, 1) if ranks % 2 else (0, 3, 1)
        repeated = repeat_block(Block(2, 1, 2, 1, pauses), ranks, microbatches)
        # Warm-up and cool-down of the repeated block leave gaps that weight gradients fill.
        return move_weight_grads(repeated, StageCosts.uniform(2 * ranks))
