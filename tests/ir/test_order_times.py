"""Timing: when passes end without messages, and the loop that runs lines of items."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir import (
    Forward,
    Needs,
    Orders,
    Reduce,
    Schedule,
    Send,
    StageCosts,
    pass_seconds,
    schedule_length,
    walk,
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


def test_actions_that_are_no_passes_take_no_time():
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


def needs(num_items, *pairs):
    """Needs of pairs (waiting item, needed item)."""
    waiter, needed = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return Needs.of(num_items, waiter, needed)


def test_a_line_does_its_items_one_after_another():
    assert walk([0, 3], needs(3), [1.0, 2.0, 3.0]).ends.tolist() == [1, 3, 6]


def test_an_item_starts_when_what_it_needs_has_ended():
    # line 0: items 0, 1; line 1: items 2, 3, where 2 needs 1
    result = walk([0, 2, 4], needs(4, (2, 1)), [1.0, 1.0, 5.0, 1.0])
    assert result.ends.tolist() == [1, 2, 7, 8]
    assert result.finished


def test_an_item_waits_for_the_last_of_several():
    assert walk([0, 1, 2, 3], needs(3, (0, 1), (0, 2)), [1.0, 4.0, 2.0]).ends.tolist() == [5, 4, 2]


def test_a_tail_delays_others_but_not_the_own_line():
    result = walk([0, 2, 3], needs(3, (2, 0)), [1.0, 1.0, 1.0], tails=[10.0, 0.0, 0.0])
    assert result.ends.tolist() == [11, 2, 12]


def test_without_seconds_everything_ends_at_once():
    assert walk([0, 1, 2], needs(2, (0, 1))).ends.tolist() == [0, 0]


def test_lines_that_wait_for_each_other_block():
    result = walk([0, 2, 4], needs(4, (0, 3), (2, 1)))
    assert not result.finished
    assert result.blocked == {0: (0, 3), 1: (2, 1)}
    assert result.ends.tolist() == [-1, -1, -1, -1]


def test_a_line_stands_at_its_first_item_that_cannot_run():
    result = walk([0, 2, 3], needs(3, (1, 0), (1, 2), (2, 1)), [1.0] * 3)
    assert result.blocked == {0: (1, 2), 1: (2, 1)}
    assert result.ends.tolist() == [1, -1, -1]


def test_a_line_that_is_not_in_the_knot_ends():
    result = walk([0, 1, 2, 4], needs(4, (0, 1), (1, 0)), [1.0] * 4)
    assert result.ends.tolist() == [-1, -1, 1, 2]
    assert set(result.blocked) == {0, 1}


def test_an_item_that_needs_itself_blocks():
    assert walk([0, 1], needs(1, (0, 0))).blocked == {0: (0, 0)}


def test_a_line_without_items_is_finished():
    assert walk([0, 0, 1], needs(1), [2.0]).ends.tolist() == [2]


@given(st.integers(0, 2**32))
def test_times_are_the_longest_paths(seed):
    rng = random.Random(seed)
    lengths = [rng.randrange(4) for _ in range(3)]
    starts = [0, *np.cumsum(lengths).tolist()]
    seconds, pairs = [float(rng.randrange(4)) for _ in range(starts[-1])], []
    expected, clock = {}, [0.0] * 3
    for line, item in possible_sequence(starts, rng):
        needed = rng.sample(sorted(expected), rng.randrange(min(len(expected), 3) + 1))
        pairs += [(item, other) for other in needed]
        expected[item] = clock[line] = max([clock[line], *(expected[other] for other in needed)]) + seconds[item]
    ends = walk(starts, needs(starts[-1], *pairs), seconds).ends.tolist()
    assert ends == [expected[item] for item in range(starts[-1])]


def possible_sequence(starts, rng):
    """Pairs (line, item) in an order in which all items can run."""
    turns = [line for line in range(len(starts) - 1) for _ in range(starts[line], starts[line + 1])]
    rng.shuffle(turns)
    heads = list(starts)
    for line in turns:
        yield line, heads[line]
        heads[line] += 1
