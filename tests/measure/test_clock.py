"""The clock, typical times, and arithmetic on the times of a node."""

import gc
import time

import pytest
import torch

from penstock.measure.timing import Clock, Times, typical, waited_seconds, without_gc


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([1.0], 1.0), ([1.0, 9.0], 5.0), ([1.0, 8.0, 9.0], 1.0), ([2.0, 90.0, 1.0, 80.0, 3.0], 2.0)],
)
def test_the_two_largest_are_dropped_if_more_are_left_and_the_median_of_the_rest_is_taken(samples, expected):
    assert typical(samples) == expected


def test_time_asleep_counts():
    seconds, result = Clock(torch.device("cpu")).seconds(lambda: time.sleep(0.02) or "done")
    assert seconds > 0.01
    assert result == "done"


def test_waiting_for_a_core_is_counted_by_the_system_and_only_grows():
    before = waited_seconds()
    assert waited_seconds() >= before >= 0.0


def test_garbage_is_not_looked_for_meanwhile_and_afterwards_as_before():
    with without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_running_takes_by_itself_is_taken_off_but_never_everything():
    assert Times(3.0, 2.0, 1.0, 0.0).without(Times(1.0, 2.0, 5.0, 1.0)) == pytest.approx((2.0, 0.1, 0.05, 0.0))


def test_forwards_and_backwards_are_scaled_apart():
    assert Times(1.0, 2.0, 3.0, 4.0).scaled(10.0, 100.0) == (10.0, 200.0, 300.0, 400.0)


def test_a_step_is_a_forward_and_a_full_backward():
    assert Times(1.0, 2.0, 30.0, 40.0).step == 3.0


def test_each_pass_has_its_own_typical_time():
    samples = [Times(1.0, 9.0), Times(2.0, 8.0), Times(9.0, 1.0)]
    assert Times.typical(samples)[:2] == (1.0, 1.0)
    assert Times.median(samples)[:2] == (2.0, 8.0)
