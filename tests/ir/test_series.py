"""Series: a row of numbers that behaves like a tuple."""

import numpy as np
import pytest

from penstock.ir import Series


def test_a_series_reads_like_a_tuple():
    series = Series([1, 2.5])
    assert (len(series), series[1], list(series)) == (2, 2.5, [1.0, 2.5])


def test_equal_series_are_equal_and_hash_alike():
    assert Series([1, 2]) == Series(np.array([1.0, 2.0]))
    assert hash(Series([1, 2])) == hash(Series((1.0, 2.0)))
    assert Series([1, 2]) != Series([1, 2, 3])
    assert Series([1]) != (1.0,)


def test_zero_and_minus_zero_are_equal_and_hash_alike():
    assert Series([0.0]) == Series([-0.0])
    assert hash(Series([0.0])) == hash(Series([-0.0]))


def test_a_series_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        Series([1]).values[0] = 2


def test_a_series_does_not_change_with_the_array_it_was_made_from():
    array = np.array([1.0])
    series = Series(array)
    array[0] = 2.0
    assert series[0] == 1.0


def test_a_long_series_prints_its_beginning():
    assert repr(Series(range(8))) == "Series(8: 0, 1, 2, 3, 4, 5, ...)"
    assert repr(Series([0.5])) == "Series(1: 0.5)"
