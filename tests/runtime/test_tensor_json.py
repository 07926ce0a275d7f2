"""Values come back from a document as they were; what a document cannot hold is refused."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import CheckpointError, DamagedError
from penstock.runtime.tensor_json import decode_tree, encode_tree, json_bytes, parse_json


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json_bytes(encode_tree(value, tensors, "x"))
    return decode_tree(parse_json(text, "x"), tensors.__getitem__)


PLAIN = [
    None,
    [1, 2.5, True, "x"],
    (float("inf"), {3: "c", "$x": (1,)}),
    Counter("abb"),
    torch.bfloat16,
    {"$tuple": 1},
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back(value: Any) -> None:
    assert there_and_back(value) == value
    assert type(there_and_back(value)) is type(value)


def test_keys_with_dots_keep_their_own_tensors() -> None:
    one, two, three, four = map(torch.tensor, range(1, 5))
    found = there_and_back({"a.b": one, "a": {"b": two}, "c": [three], "c.0": four})
    assert [int(one) for one in (found["a.b"], found["a"]["b"], found["c"][0], found["c.0"])] == [1, 2, 3, 4]


@pytest.mark.parametrize("array", [np.array(3.0), np.arange(6).reshape(2, 3).T, np.arange(3, dtype=">i4"), np.zeros(0)])
def test_arrays_keep_their_shape_and_numbers(array: Any) -> None:
    found = there_and_back(array)
    assert found.shape == array.shape
    assert np.array_equal(found, array)


def circle() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


IMPOSSIBLE = [np.array(["a"]), np.array([None]), circle(), 10**5000, print, {1, 2}]


@pytest.mark.parametrize("value", IMPOSSIBLE, ids=lambda value: type(value).__name__)
def test_values_that_cannot_be_saved_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError):
        there_and_back(value)


FORGED = [
    {"$tuple": 5},
    {"$dict": [5]},
    {"$dict": [[[1], 2]]},
    {"$dtype": [5]},
    {"$float": [5]},
    {"$float": "five"},
    {"$class": "os.system"},
]


@pytest.mark.parametrize("value", FORGED, ids=repr)
def test_invalid_values_count_as_damage(value: Any) -> None:
    with pytest.raises(DamagedError):
        decode_tree(value, {}.__getitem__)


def test_values_nested_too_deeply_count_as_damage() -> None:
    with pytest.raises(DamagedError):
        parse_json(b"[" * 100_000, "x")
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(DamagedError):
        decode_tree(deep, {}.__getitem__)
