"""Clock: what is typical, and what counts as time."""

import gc
import time

import pytest
import torch

from penstock.measure.clock import Clock, typical, waited_seconds, without_gc


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
