"""A row says the same on every rank, and has one size whatever it says."""

import math

import pytest

from penstock.runtime import Figures
from penstock.runtime.row import ROOM, ROW_BYTES, Key, Row, merged

KEY = Key(3, 12, 77, -(2**63), 2**32 - 1)
ROWS = [
    Row(KEY),
    Row(KEY, "clip_grad_norm_(1.0)", 12, Figures((1.0, -2.5), (math.inf,)), tuple(map(float, range(ROOM)))),
    Row(KEY, "é" * 200, 0, Figures((0.0,) * 4, (-1.0,) * 4), (0.5,)),
]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_read_as_it_was_written(row: Row) -> None:
    data = row.pack()
    read = Row.unpack(data)
    assert len(data) == ROW_BYTES
    assert (read.key, read.text_bytes, read.content) == (row.key, row.text_bytes, row.content)
    assert row.words.startswith(read.words)
    assert read.figures.sums[: len(row.figures.sums)] == row.figures.sums
    assert read.figures.maxes[: len(row.figures.maxes)] == row.figures.maxes


def test_figures_are_summed_and_the_largest_counts() -> None:
    figures = [Figures((1.0, 2.0), (-1.0, 5.0)), Figures((0.5, -2.0), (-3.0, 7.0))]
    assert merged(figures) == Figures((1.5, 0.0), (-1.0, 7.0))


def test_what_is_not_a_number_is_the_largest() -> None:
    for order in ((math.nan, 1.0), (1.0, math.nan)):
        (largest,) = merged([Figures((), (value,)) for value in order]).maxes
        assert math.isnan(largest)
