"""Slow ranks are found within ten steps, once each, and not mistaken for noise or wrong plans."""

import pytest

from penstock.planner.slow_ranks import SlowRank, SlowRankDetector
from tests.planner.steps import Steps, planned

CLEAN = 200
SINCE = 30


def flagged(steps: Steps, ranks: SlowRankDetector, numbers: range, **slow: float) -> list[tuple[int, SlowRank]]:
    """Ranks by the step that showed them, in steps in which e.g. rank2 is so many times slower."""
    factors = {int(name.removeprefix("rank")): factor for name, factor in slow.items()}
    return [(number, each) for number in numbers for each in ranks.observe(number, steps.take(factors))]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_a_rank_that_becomes_slow_is_found_within_ten_steps(schedule, rank, factor):
    plan = planned(schedule=schedule)
    steps, ranks = Steps(plan), SlowRankDetector(plan)
    assert not flagged(steps, ranks, range(SINCE))
    [(step, found)] = flagged(steps, ranks, range(SINCE, SINCE + 20), **{f"rank{rank}": factor})
    assert (found.rank, step - SINCE < 10) == (rank, True)
    assert found.since in range(SINCE - 2, SINCE + 3)
    assert found.over_plan == pytest.approx(factor, rel=0.15)
    assert found.over_peers == pytest.approx(factor, rel=0.15)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_slow_from_the_start_is_found_within_ten_steps(ranks):
    plan = planned(ranks)
    [(step, found)] = flagged(Steps(plan), SlowRankDetector(plan), range(20), rank1=1.6)
    assert step < 10
    assert str(found).startswith("rank 1 is slow from the start, or the plan misjudges its stages: 1.")


@pytest.mark.untraced
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_slow_rank(ranks, seed):
    plan = planned(ranks)
    assert not flagged(Steps(plan, seed), SlowRankDetector(plan), range(CLEAN))


@pytest.mark.parametrize("factor", [0.5, 1.3, 3.0])
def test_a_plan_that_is_wrong_about_all_ranks_makes_none_of_them_slow(factor):
    plan = planned()
    wrong = dict.fromkeys(range(4), factor)
    assert not flagged(Steps(plan, wrong=wrong), SlowRankDetector(plan), range(CLEAN))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_a_plan_that_is_a_little_wrong_about_one_rank_does_not_make_it_slow(ranks, factor):
    plan = planned(ranks)
    assert not flagged(Steps(plan, wrong={1: factor}), SlowRankDetector(plan), range(CLEAN))


def test_a_rank_that_takes_less_than_planned_is_slow_when_it_takes_half_as_long_again():
    plan = planned()
    steps, ranks = Steps(plan, wrong=dict.fromkeys(range(4), 0.8)), SlowRankDetector(plan)
    assert not flagged(steps, ranks, range(SINCE))
    assert [found.rank for _, found in flagged(steps, ranks, range(SINCE, SINCE + 10), rank3=1.5)] == [3]


def test_a_slow_rank_is_reported_again_only_after_it_recovered():
    plan = planned()
    steps, ranks = Steps(plan), SlowRankDetector(plan)
    assert len(flagged(steps, ranks, range(60), rank2=2.0)) == 1
    assert [each.rank for each in ranks.slow] == [2]
    assert not flagged(steps, ranks, range(60, 90))
    assert ranks.slow == ()
    assert len(flagged(steps, ranks, range(90, 120), rank2=2.0)) == 1


def test_two_slow_ranks_of_four_are_both_found():
    plan = planned()
    found = flagged(Steps(plan), SlowRankDetector(plan), range(20), rank1=2.0, rank2=1.7)
    assert sorted(each.rank for _, each in found) == [1, 2]


def test_the_first_step_and_a_single_rank_are_not_reported():
    plan = planned()
    steps, ranks = Steps(plan), SlowRankDetector(plan)
    assert not flagged(steps, ranks, range(1), rank2=50.0)
    assert not flagged(steps, ranks, range(1, 20))
    alone = planned(1)
    assert not flagged(Steps(alone), SlowRankDetector(alone), range(20), rank0=9.0)


def test_a_slow_rank_is_described_in_a_sentence():
    words = "rank 2 is slow since step 41: 1.8 times the plan, 1.7 times its "
    assert str(SlowRank(2, 41, 1.82, 1.7, 3, False)) == words + "peers"
    assert str(SlowRank(2, 41, 1.82, 1.7, 1, False)) == words + "only peer"
