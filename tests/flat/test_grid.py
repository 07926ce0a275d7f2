"""The grid of ranks: groups along each dimension, in any order of the dimensions."""

import pytest

from penstock.errors import RunError
from penstock.flat.topology import Grid


def test_the_last_dimension_is_the_innermost() -> None:
    grid = Grid.of([("data", 2), ("pipe", 2), ("tensor", 2)], 8)
    assert grid.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.groups("pipe") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("data") == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_dimensions_stand_in_any_order() -> None:
    grid = Grid.of([("pipe", 3), ("data", 2)], 6)
    assert grid.groups("pipe") == ((0, 2, 4), (1, 3, 5))
    assert grid.groups("data") == ((0, 1), (2, 3), (4, 5))


def test_the_ranks_of_one_model_are_all_that_share_a_replica() -> None:
    assert Grid.of([("tensor", 2), ("data", 2), ("pipe", 2)], 8).groups("model") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert Grid.of([("pipe", 4)], 4).groups("model") == ((0, 1, 2, 3),)
    assert "model" not in Grid.of([("data", 4)], 4).kinds


def test_a_size_that_was_divided_is_a_whole_number_too() -> None:
    assert Grid.of([("data", 8 / 2), ("pipe", 2)], 8).sizes == (4, 2)


@pytest.mark.parametrize(
    ("dimensions", "words"),
    [
        ([("data", 2), ("pipe", 3)], "must multiply to the number of processes"),
        ([("pipe", 2), ("pipe", 2)], "must have different names"),
        ([("pipe", 0), ("data", 4)], "whole number, 1 or more"),
        ([("pipe", 1.5), ("data", 4)], "whole number, 1 or more"),
        ([("model", 4)], "invalid name"),
        (["pipe"], "a pair of a name and a size"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(dimensions: list[object], words: str) -> None:
    with pytest.raises(RunError, match=words):
        Grid.of(dimensions, 4)


def test_an_unknown_group_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RunError, match="known: pipe, model, global"):
        Grid.of([("pipe", 4)], 4).groups("tensor")
