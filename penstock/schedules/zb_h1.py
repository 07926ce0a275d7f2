"""1f1b with the backward split; weight gradients fill most of the bubble at the memory of 1f1b.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism". Choose it over 1f1b whenever the backward can be split cheaply: the
bubble shrinks from (ranks - 1)(F + I + W) to (ranks - 1)(F + I - W).

For 4 ranks and 4 microbatches:

    rank 0 | F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
    rank 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
    rank 2 | .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
    rank 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
"""

from dataclasses import dataclass

from penstock.ir import Kind, Orders, Placement, Schedule
from penstock.schedules.base import Scheduler, passes, staggered, weight_grads_of


@dataclass(frozen=True)
class ZBH1(Scheduler):
    """One stage per rank; rank r delays its weight gradients by r."""

    name = "zb_h1"
    allowed_stages_per_rank = (1,)
    splits_backward = True

    def build(self, ranks: int, microbatches: int) -> Schedule:
        return split_1f1b(ranks, microbatches, pace=1)


def split_1f1b(ranks: int, microbatches: int, pace: int) -> Schedule:
    """1f1b with the backward split in two, for zb_h1 (pace 1) and zb_h2 (pace 2).

    Rank r runs pace (ranks - 1 - r) forwards ahead and pace r weight gradients behind.
    """
    orders = []
    for rank in range(ranks):
        ahead = pace * (ranks - 1 - rank)
        input_grads = passes(Kind.INPUT_GRAD, rank, microbatches)
        orders.append(
            staggered(
                (passes(Kind.FORWARD, rank, microbatches), 0),
                (input_grads, ahead),
                (weight_grads_of(input_grads), ahead + pace * rank),
            )
        )
    return Schedule(Placement.loop(ranks), microbatches, Orders(orders))
