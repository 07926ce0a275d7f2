"""Placement: loop, vee and any other, and what is no placement."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Placement


def test_a_loop_goes_round():
    assert Placement.loop(3, 2).ranks == (0, 1, 2, 0, 1, 2)


def test_a_vee_goes_down_and_back_up():
    assert Placement.vee(4).ranks == (0, 1, 2, 3, 3, 2, 1, 0)


def test_a_placement_answers_both_ways():
    placement = Placement.vee(2)
    assert [placement[stage] for stage in range(4)] == [0, 1, 1, 0]
    assert placement.stages == ((0, 3), (1, 2))


def test_sizes():
    placement = Placement((0, 1, 0))
    assert (placement.num_stages, len(placement), placement.num_ranks) == (3, 3, 2)


@pytest.mark.parametrize("ranks", [(), (-1,), (0, -1)])
def test_every_stage_needs_a_rank(ranks):
    with pytest.raises(ScheduleError, match="must name a rank"):
        Placement(ranks)


@pytest.mark.parametrize("ranks", [(1,), (0, 2), (0, 0, 2), (0, 10**15)])
def test_every_rank_needs_a_stage(ranks):
    with pytest.raises(ScheduleError, match="ranks without a stage"):
        Placement(ranks)
