"""Times: what is left, scaled and typical of seconds."""

import pytest

from penstock.measure.clock import Times


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
