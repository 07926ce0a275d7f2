"""interleaved_zb: interleaved stages with the backward split, weight gradients filling the bubble.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (its one-fold memory variant, over several stages per rank). Choose
it over interleaved when the backward can be split cheaply: a shorter warm-up, hence less memory and less bubble.
"""

from dataclasses import dataclass

from penstock.ir.action import Kind
from penstock.ir.orders import Orders
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.base import Scheduler, passes, staggered, weights_of
from penstock.schedules.rounds import Rounds


@dataclass(frozen=True)
class InterleavedZB(Scheduler):
    """Any number of stages per rank; rank r delays its weight gradients by r."""

    stages_per_rank: int = 2
    name = "interleaved_zb"
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        rounds = Rounds(ranks, microbatches, self.stages_per_rank)
        local, each = rounds.sequence()
        last = self.stages_per_rank - 1
        orders = []
        for rank in range(ranks):
            warm_up = rounds.lead + ranks - 1 - rank
            input_grads = passes(Kind.INPUT_GRAD, (last - local) * ranks + rank, each)
            orders.append(
                staggered(
                    (passes(Kind.FORWARD, local * ranks + rank, each), 0),
                    (input_grads, warm_up),
                    (weights_of(input_grads), warm_up + rank),
                )
            )
        return Schedule(Placement.loop(ranks, self.stages_per_rank), microbatches, Orders(orders))
