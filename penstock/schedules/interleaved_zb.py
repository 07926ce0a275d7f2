"""Interleaved stages with the backward split, weight gradients filling the bubble.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (its one-fold memory variant, over several stages per rank). Choose
it over interleaved when the backward can be split cheaply: a shorter warm-up, hence less memory and less bubble.

For 2 ranks and 4 microbatches:

    rank 0 | 0F0 0F1 2F0 2F1 .   2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    rank 1 | .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3
"""

from dataclasses import dataclass

from penstock.ir import Kind, Orders, Placement, Schedule
from penstock.schedules.base import Scheduler, passes, staggered, weight_grads_of
from penstock.schedules.interleaved import Rounds


@dataclass(frozen=True)
class InterleavedZB(Scheduler):
    """Any number of stages per rank; rank r delays its weight gradients by r."""

    stages_per_rank: int = 2
    name = "interleaved_zb"
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        rounds = Rounds(ranks, microbatches, self.stages_per_rank)
        local, numbers = rounds.sequence()
        last = self.stages_per_rank - 1
        orders = []
        for rank in range(ranks):
            warm_up = rounds.lead + ranks - 1 - rank
            input_grads = passes(Kind.INPUT_GRAD, (last - local) * ranks + rank, numbers)
            orders.append(
                staggered(
                    (passes(Kind.FORWARD, local * ranks + rank, numbers), 0),
                    (input_grads, warm_up),
                    (weight_grads_of(input_grads), warm_up + rank),
                )
            )
        return Schedule(Placement.loop(ranks, self.stages_per_rank), microbatches, Orders(orders))
