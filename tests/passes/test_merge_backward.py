"""merge_backward: adjacent halves become one, others stay apart."""

import pytest

from penstock.ir import Schedule
from penstock.passes import MergeBackward


@pytest.mark.parametrize(
    ("split", "merged"),
    [
        ("0F0 0I0 0W0", "0F0 0B0"),
        ("0F0 0F1 0I0 0W0 0I1 0W1", "0F0 0F1 0B0 0B1"),
        ("0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0F1 0I0 0I1 0W0 0W1"),
        ("0F0 0F1 0I0 0I1 0W1 0W0", "0F0 0F1 0I0 0B1 0W0"),
        ("0F0 1F0 1I0 0I0 0W0 1W0", "0F0 1F0 1I0 0B0 1W0"),
        ("0F0 0B0", "0F0 0B0"),
        ("0F0 0I0 0W0\n1F0 1I0 1W0", "0F0 0B0\n1F0 1B0"),
    ],
)
def test_an_input_gradient_followed_by_its_weight_gradient_becomes_a_full_backward(split: str, merged: str) -> None:
    assert str(MergeBackward()(Schedule.from_csv(split))) == merged


def test_halves_of_two_ranks_are_not_adjacent() -> None:
    schedule = Schedule.from_csv("0F0 0I0\n1W0 1F0")
    assert MergeBackward()(schedule) == schedule
