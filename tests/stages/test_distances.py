"""How far tensors are apart, also where they are missing or hold no numbers."""

import math

import pytest
import torch
from torch import Tensor

from penstock.stages import distances

NAN, INF = math.nan, math.inf


def apart(expected: Tensor | None, found: Tensor | None) -> float:
    (one,) = distances({"a": expected}, {"a": found})
    return one.apart


@pytest.mark.parametrize(
    ("expected", "found", "distance"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([INF, 1.0], [INF, 1.0], 0.0),
        ([NAN, 1.0], [NAN, 3.0], 2.0),
        ([], [], 0.0),
    ],
)
def test_entries_are_compared_where_they_differ(expected: list[float], found: list[float], distance: float) -> None:
    assert apart(torch.tensor(expected), torch.tensor(found)) == distance


def test_missing_tensors_and_other_shapes_are_infinitely_far() -> None:
    assert apart(None, None) == 0.0
    assert apart(None, torch.zeros(2)) == apart(torch.zeros(2), None) == INF
    assert apart(torch.zeros(2), torch.zeros(3)) == INF
    assert math.isnan(apart(torch.zeros(2), torch.tensor([0.0, NAN])))


def test_complex_and_sparse_numbers_are_numbers() -> None:
    assert apart(torch.tensor([3j]), torch.tensor([0j])) == 3.0
    assert apart(torch.eye(2).to_sparse(), torch.zeros(2, 2)) == 1.0


def test_every_name_of_either_side_is_there() -> None:
    found = list(distances({"a": torch.ones(1), "b": None}, {"c": torch.ones(1)}))
    assert [(one.name, one.apart) for one in found] == [("a", INF), ("b", 0.0), ("c", INF)]
    (one,) = distances({"a": torch.tensor([-4.0, INF])}, {"a": torch.tensor([-4.0, INF])})
    assert (one.largest, one.dtype) == (4.0, "float32")
