"""1f1b with the backward split in two: the family of zb_h1 and zb_h2."""

from penstock.ir import Kind, Orders, Placement, Schedule
from penstock.schedules.base import passes, staggered, weights_of


def split_1f1b(ranks: int, microbatches: int, pace: int) -> Schedule:
    """Rank r runs pace (ranks - 1 - r) forwards ahead and pace r weight gradients behind: pace (ranks - 1) in all."""
    orders = []
    for rank in range(ranks):
        ahead = pace * (ranks - 1 - rank)
        input_grads = passes(Kind.INPUT_GRAD, rank, microbatches)
        orders.append(
            staggered(
                (passes(Kind.FORWARD, rank, microbatches), 0),
                (input_grads, ahead),
                (weights_of(input_grads), ahead + pace * rank),
            )
        )
    return Schedule(Placement.loop(ranks), microbatches, Orders(orders))
