"""Timing: when the passes of a schedule end without messages."""

import pytest

from penstock.ir import (
    Forward,
    Orders,
    Reduce,
    Schedule,
    Send,
    StageCosts,
    pass_seconds,
    schedule_length,
    walk_passes,
)

COSTS = StageCosts(forward=(1.0, 2.0), input_grad=(3.0, 4.0), weight_grad=(5.0, 6.0), backward=(7.0, 9.0))


def test_every_kind_of_pass_has_its_seconds():
    table = Schedule.from_csv("0F0,0I0,0W0,0B0\n1F0,1I0,1W0,1B0").table
    assert pass_seconds(table, COSTS).tolist() == [1, 3, 5, 7, 2, 4, 6, 9]


@pytest.mark.parametrize(("overlap", "seconds"), [(0.0, 10.0), (0.5, 9.5), (1.0, 9.0)])
def test_an_overlapped_pair_hides_a_share_of_its_shorter_half(overlap, seconds):
    table = Schedule.from_csv("0F0,(0F1;1B0)OVERLAP_F_B,1F0").table
    assert pass_seconds(table, COSTS, overlap)[1] == seconds


def test_what_is_no_pass_takes_no_time():
    assert pass_seconds(Orders.of([[Send(0, 0, 1), Reduce(1), Forward(1, 0)]]), COSTS).tolist() == [0, 0, 2]


def test_a_schedule_takes_as_long_as_its_staircase():
    # 0: F0 F1 .. .. B0 B0 .. B1 B1        1: .. F0 B0 B0 F1 B1 B1
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    assert schedule_length(schedule, StageCosts.uniform(2)).makespan == 9.0


def test_all_forwards_first_takes_as_long_here():
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1")
    ends = walk_passes(
        schedule.table, schedule.dependencies(), pass_seconds(schedule.table, StageCosts.uniform(2))
    ).ends
    assert ends.tolist() == [1, 2, 7, 9, 2, 3, 5, 7]


def test_a_weight_gradient_waits_for_nobody_but_its_own_rank():
    schedule = Schedule.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0")
    assert schedule_length(schedule, StageCosts.uniform(2)).makespan == 5.0


def test_a_rank_that_needs_what_it_makes_later_blocks():
    schedule = Schedule.from_csv("0B0,0F0\n1F0,1B0")
    assert walk_passes(schedule.table, schedule.dependencies()).blocked == {0: (0, 1), 1: (2, 1)}
