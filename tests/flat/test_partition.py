"""Partitions of a list of modules over ranks."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.errors import PartitionError
from penstock.flat import partition_balanced, partition_uniform


def layers(*widths: int) -> list[nn.Module]:
    return [nn.Linear(width, 1, bias=False) for width in widths]


def sizes(portions: list[list[nn.Module]]) -> list[int]:
    return [sum(parameter.numel() for module in portion for parameter in module.parameters()) for portion in portions]


def test_a_remainder_is_spread_over_the_first_ranks() -> None:
    assert [len(partition_uniform([nn.ReLU()] * 11, 4, stage)) for stage in range(4)] == [3, 3, 3, 2]


def test_portions_follow_each_other() -> None:
    entries = layers(*range(1, 8))
    for partition in (partition_uniform, partition_balanced):
        assert [entry for stage in range(3) for entry in partition(entries, 3, stage)] == entries


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_the_largest_balanced_portion_is_the_smallest_possible(widths: list[int], stages: int) -> None:
    stages = min(stages, len(widths))
    entries = layers(*widths)
    portions = [partition_balanced(entries, stages, stage) for stage in range(stages)]
    assert all(portions)
    cuts = combinations(range(1, len(widths)), stages - 1)
    best = min(max(sum(widths[low:high]) for low, high in pairwise((0, *cut, len(widths)))) for cut in cuts)
    assert max(sizes(portions)) == best


def test_functions_have_no_parameters_and_still_a_position() -> None:
    entries = [*layers(4, 4), abs, *layers(4)]
    assert [len(partition_balanced(entries, 3, stage)) for stage in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("partition", [partition_uniform, partition_balanced])
def test_fewer_entries_than_stages_are_refused(partition: object) -> None:
    with pytest.raises(PartitionError, match=r"fewer entries than stages \(entries: 2, stages: 3\)"):
        partition(layers(1, 1), 3, 0)  # type: ignore[operator]
