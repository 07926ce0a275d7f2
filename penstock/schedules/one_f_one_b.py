"""After a short warm-up, one forward and one backward in turn.

Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", in its synchronous form. Choose
it as the default with one stage per rank: rank r holds at most ranks - r microbatches.

For 4 ranks and 4 microbatches:

    rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
    rank 1 | .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3 .  .
    rank 2 | .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .  .  .
    rank 3 | .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .  .  .
"""

from dataclasses import dataclass

from penstock.ir import Kind, Orders, Placement, Schedule
from penstock.schedules.base import Scheduler, passes, staggered


@dataclass(frozen=True)
class OneFOneB(Scheduler):
    """One stage per rank; rank r runs ranks - 1 - r forwards ahead."""

    name = "1f1b"
    allowed_stages_per_rank = (1,)

    def build(self, ranks: int, microbatches: int) -> Schedule:
        orders = [
            staggered(
                (passes(Kind.FORWARD, rank, microbatches), 0),
                (passes(Kind.BACKWARD, rank, microbatches), ranks - 1 - rank),
            )
            for rank in range(ranks)
        ]
        return Schedule(Placement.loop(ranks), microbatches, Orders(orders))
