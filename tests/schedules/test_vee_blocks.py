"""Blocks: one microbatch on a V, repeated every six units of time."""

import pytest

from penstock.schedules import VHalf, VMin
from penstock.schedules.vee_blocks import Block, _weight_times, repeat_block

TIGHT = Block(1, 1, 1, 1, (0, 0, 0))


def test_a_block_goes_down_up_down_and_up_the_ranks():
    assert [TIGHT.times(rank, 3) for rank in range(3)] == [
        # first forward, second forward, second input gradient, first input gradient
        (0, 5, 6, 11),
        (1, 4, 7, 10),
        (2, 3, 8, 9),
    ]


def test_slower_legs_take_more_units_between_neighbours():
    assert [Block(2, 1, 2, 1, (0, 0, 0)).times(rank, 2) for rank in range(2)] == [(0, 4, 5, 9), (2, 3, 7, 8)]


def test_pauses_stand_at_the_three_turns():
    assert Block(1, 1, 1, 1, (10, 20, 30)).times(0, 1) == (0, 11, 32, 63)


def test_weight_gradients_take_the_free_remainders_as_early_as_they_can():
    assert _weight_times((0, 1, 2, 3)) == (4, 5)  # remainders 0, 1, 2, 3 are taken, 4 and 5 free
    assert _weight_times((0, 3, 4, 7)) == (5, 8)  # 0, 3, 4, 1 are taken, 2 and 5 free


def test_repeating_a_block_keeps_the_order_of_its_moments():
    assert str(repeat_block(TIGHT, 1, 2)) == "0F0 1F0 1I0 0I0 1W0 0W0 0F1 1F1 1I1 0I1 1W1 0W1"


@pytest.mark.parametrize("ranks", range(1, 30))
@pytest.mark.parametrize("member", [VHalf, VMin])
def test_no_two_passes_of_a_rank_share_a_remainder_by_six(member, ranks, monkeypatch):
    blocks = []
    for module in ("v_half", "v_min"):
        monkeypatch.setattr(f"penstock.schedules.{module}.repeat_block", lambda block, *sizes: blocks.append(block))
    monkeypatch.setattr("penstock.schedules.v_half.move_weight_grads", lambda schedule, costs: schedule)
    member().build(ranks, 1)
    for rank in range(ranks):
        assert len({time % 6 for time in blocks[0].times(rank, ranks)}) == 4
