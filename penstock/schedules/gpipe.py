"""All forwards, then all backwards.

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism". Choose it when
memory does not matter, as the simplest order; 1f1b takes the same time with less memory.

For 4 ranks and 4 microbatches:

    rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 1 | .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
    rank 2 | .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
    rank 3 | .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .  .  .
"""

from dataclasses import dataclass

from penstock.ir import Kind, Orders, Placement, Schedule
from penstock.schedules.base import Scheduler, passes, staggered


@dataclass(frozen=True)
class GPipe(Scheduler):
    """One stage per rank; every microbatch is in flight at once."""

    name = "gpipe"
    allowed_stages_per_rank = (1,)

    def build(self, ranks: int, microbatches: int) -> Schedule:
        orders = [
            staggered(
                (passes(Kind.FORWARD, rank, microbatches), 0), (passes(Kind.BACKWARD, rank, microbatches), microbatches)
            )
            for rank in range(ranks)
        ]
        return Schedule(Placement.loop(ranks), microbatches, Orders(orders))
