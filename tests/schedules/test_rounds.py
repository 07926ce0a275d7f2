"""Rounds: how interleaved schedules walk over stages and microbatches."""

import pytest

from penstock.schedules.interleaved import Rounds


@pytest.mark.parametrize(
    ("ranks", "microbatches", "sizes"),
    [
        (4, 8, [4, 4]),
        (4, 10, [5, 5]),
        (4, 9, [5, 4]),
        (4, 11, [6, 5]),
        (4, 3, [3]),
        (4, 4, [4]),
        (1, 3, [1, 1, 1]),
        (3, 11, [4, 4, 3]),
    ],
)
def test_there_are_as_many_rounds_as_the_ranks_fit_in_and_they_are_as_equal_as_possible(ranks, microbatches, sizes):
    assert Rounds(ranks, microbatches, 2).sizes.tolist() == sizes


def test_a_round_visits_every_stage_of_the_rank_before_the_next_begins():
    local, microbatch = Rounds(ranks=2, microbatches=5, stages_per_rank=2).sequence()
    assert list(zip(local.tolist(), microbatch.tolist(), strict=True)) == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
        (0, 3), (0, 4), (1, 3), (1, 4),
    ]  # fmt: skip


def test_the_lead_is_one_round_for_each_stage_but_the_last():
    assert [Rounds(4, 10, stages).lead for stages in (1, 2, 3)] == [0, 5, 10]
