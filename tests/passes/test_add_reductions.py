"""add_reductions: once per stage, after its last gradient."""

import pytest

from penstock.ir import Action, Backward, Message, Overlap, Program, Reduce, WeightGrad
from penstock.passes import AddReductions, AddTransfers
from penstock.schedules import SCHEDULES, build


def last_gradient(order: tuple[Action, ...], stage: int) -> int:
    """Where in the order the stage's last B or W stands, alone or as a half of a pair."""
    halves = [(place, a.backward if isinstance(a, Overlap) else a) for place, a in enumerate(order)]
    return max(place for place, a in halves if isinstance(a, Backward | WeightGrad) and a.stage == stage)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_is_reduced_once_right_after_its_last_gradient_and_the_messages_there(name: str) -> None:
    for num_ranks, num_microbatches in ((1, 1), (2, 3), (4, 4)):
        program = AddReductions()(AddTransfers()(build(name, num_ranks, num_microbatches).with_cuts()))
        for order, stages in zip(program.orders, program.placement.stages, strict=True):
            assert sorted(a.stage for a in order if isinstance(a, Reduce)) == list(stages)
            for stage in stages:
                between = order[last_gradient(order, stage) + 1 : order.index(Reduce(stage))]
                assert all(isinstance(a, Message) for a in between)


def test_messages_are_sent_before_the_reduction() -> None:
    program = Program.from_csv("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0")
    assert str(AddReductions()(program)) == (
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD\n1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD"
    )


def test_a_stage_without_gradients_is_not_reduced() -> None:
    program = Program.from_csv("0F0 0SEND_F0\n1RECV_F0 1F0 1B0")
    assert str(AddReductions()(program)) == "0F0 0SEND_F0\n1RECV_F0 1F0 1B0 1REDUCE_GRAD"
