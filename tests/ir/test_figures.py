"""Figures: whole numbers and finite ones, and what only looks like them."""

import math
from fractions import Fraction

import numpy as np
import pytest

from penstock.ir import as_int, is_finite


@pytest.mark.parametrize(("value", "number"), [(3, 3), (-1, -1), (np.int32(3), 3), (np.uint8(0), 0)])
def test_whole_numbers_are_also_numpys(value, number):
    assert as_int(value) == number
    assert type(as_int(value)) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), 3.0, np.float64(3), "3", None, (3,)])
def test_nothing_else_is_a_whole_number(value):
    assert as_int(value) is None


@pytest.mark.parametrize("value", [0, 1.5, np.float32(1), np.int64(1), Fraction(1, 3)])
def test_numbers_are_finite(value):
    assert is_finite(value)


@pytest.mark.parametrize("value", [math.inf, math.nan, np.float64("nan"), 10**400, True, "1", None, 1j])
def test_what_is_no_number_or_has_no_end_is_not_finite(value):
    assert not is_finite(value)
