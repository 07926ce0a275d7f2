"""interleaved: 1f1b with several stages per rank, which divides the bubble by their number.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM". Choose it when
links are fast and one more fraction of activations is affordable; any number of microbatches works, a multiple of the
ranks works best.

For 2 ranks and 4 microbatches:

    rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0 2B0 0F3 2B1 2B1 2F2 0B0 0B0 2F3 0B1 0B1 .   2B2 2B2 .   2B3 2B3 0B2 0B2 0B3 0B3
    rank 1 | .   1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1F3 1B1 1B1 3F2 3B2 3B2 3F3 3B3 3B3 1B2 1B2 1B3 1B3 .   .
"""

from dataclasses import dataclass

from penstock.ir import Kind, Orders, Placement, Schedule
from penstock.schedules.base import Scheduler, passes, staggered
from penstock.schedules.rounds import Rounds


@dataclass(frozen=True)
class Interleaved(Scheduler):
    """Any number of stages per rank, placed round and round."""

    stages_per_rank: int = 2
    name = "interleaved"

    def build(self, ranks: int, microbatches: int) -> Schedule:
        rounds = Rounds(ranks, microbatches, self.stages_per_rank)
        local, each = rounds.sequence()
        last = self.stages_per_rank - 1
        orders = [
            staggered(
                (passes(Kind.FORWARD, local * ranks + rank, each), 0),
                (passes(Kind.BACKWARD, (last - local) * ranks + rank, each), rounds.lead + 2 * (ranks - 1 - rank)),
            )
            for rank in range(ranks)
        ]
        return Schedule(Placement.loop(ranks, self.stages_per_rank), microbatches, Orders(orders))
