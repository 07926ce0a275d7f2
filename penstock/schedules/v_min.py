"""A V schedule with the least activations, a third of 1f1b.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory". Choose it when memory is the limit: at most
(ranks + 4) // 3 microbatches are held, for a larger bubble than v_half.

For 3 ranks and 3 microbatches:

    rank 0 | 0F0 .   .   .   .   5F0 0F1 5I0 5W0 .   .   5F1 0F2 0I0 5I1 5W1 0W0 5F2 .   0I1 5I2 5W2 0W1 .   .   0I2 0W2
    rank 1 | .   1F0 .   .   4F0 .   .   1F1 4I0 .   4F1 4W0 1I0 1F2 1W0 4I1 4F2 4W1 1I1 1W1 .   4I2 4W2 .   1I2 1W2 .
    rank 2 | .   .   2F0 3F0 .   .   .   .   2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 .   .   3I2 2I2 3W2 2W2 .
"""

from dataclasses import dataclass

from penstock.ir import Schedule
from penstock.schedules.base import Scheduler
from penstock.schedules.vee_blocks import Block, repeat_block


@dataclass(frozen=True)
class VMin(Scheduler):
    """Exactly two stages per rank, placed as a V."""

    stages_per_rank: int = 2
    name = "v_min"
    allowed_stages_per_rank = (2,)
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        # The pause keeps the four passes of a rank on different remainders modulo six for every rank.
        pauses = (0, 0, 0) if ranks % 3 else (0, 2, 0)
        return repeat_block(Block(1, 1, 1, 1, pauses), ranks, microbatches)
