"""v_min: a V schedule with the least activations, a third of 1f1b.

Qi et al. 2024, "Pipeline Parallelism with Controllable Memory". Choose it when memory is what limits: at most
(ranks + 4) // 3 microbatches are held, for a larger bubble than v_half.
"""

from dataclasses import dataclass

from penstock.ir.schedule import Schedule
from penstock.schedules.base import Scheduler
from penstock.schedules.vee_blocks import Block, repeat_block


@dataclass(frozen=True)
class VMin(Scheduler):
    """Exactly two stages per rank, placed as a V."""

    stages_per_rank: int = 2
    name = "v_min"
    choices = (2,)
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        # The pause keeps the four passes of a rank on different remainders by six for every rank.
        pauses = (0, 0, 0) if ranks % 3 else (0, 2, 0)
        return repeat_block(Block(1, 1, 1, 1, pauses), ranks, microbatches)
