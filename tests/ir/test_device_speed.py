"""DeviceSpeed: how long an operation takes."""

import math

import pytest

from penstock.errors import CostError
from penstock.ir import DeviceSpeed

SPEED = DeviceSpeed(flops_per_second=100.0, bytes_per_second=10.0, operation_seconds=0.5)


@pytest.mark.parametrize(("flops", "num_bytes", "seconds"), [(200, 0, 2.5), (0, 30, 3.5), (200, 30, 3.5), (0, 0, 0.5)])
def test_an_operation_takes_as_long_as_the_slower_of_its_arithmetic_and_its_bytes(flops, num_bytes, seconds):
    assert SPEED.seconds(flops, num_bytes) == seconds


@pytest.mark.parametrize("figure", [0.0, -1.0, math.inf, math.nan, "fast"])
def test_a_speed_is_a_number_above_0(figure):
    with pytest.raises(CostError, match="flops_per_second must be a finite number above 0"):
        DeviceSpeed(figure, 1.0)
    with pytest.raises(CostError, match="bytes_per_second must be a finite number above 0"):
        DeviceSpeed(1.0, figure)


def test_no_operation_takes_less_than_no_time():
    with pytest.raises(CostError, match="operation_seconds must be finite seconds"):
        DeviceSpeed(1.0, 1.0, -1e-6)


def test_it_is_printed_in_round_figures():
    assert str(DeviceSpeed(3.12e14, 2.039e12)) == "3.12e+14 flop/s, 2.04e+12 B/s"
