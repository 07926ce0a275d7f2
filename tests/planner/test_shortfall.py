"""Shortfall: when nothing fits, the user hears what is short, by how much, and what would fit."""

import re

import pytest

from penstock.errors import PlanError
from penstock.ir import Cluster
from penstock.planner import Request, search
from tests.planner.chains import KEPT, measured

MODEL = measured([1.0] * 8)
STATE = 8 * 8 * 8 * 4 * 2
"""parameters and gradients of all layers"""


def refusal(memory, **asked):
    with pytest.raises(PlanError) as refused:
        search({4: MODEL}, Request(Cluster(2, memory), **asked))
    return str(refused.value)


def test_what_is_short_is_said_with_its_figures():
    told = refusal(8000, schedule="gpipe")
    assert re.search(r"with gpipe, the nearest, rank [01] lacks [\d.]+ KiB: it would hold [\d.]+ KiB of 7.81 KiB", told)
    assert re.search(r"parameters and gradients: 2 KiB, activations: [\d.]+ KiB", told)


def test_another_schedule_is_named_where_it_would_fit():
    assert 'schedule="auto"' in refusal(STATE // 2 + 11 * KEPT, schedule="gpipe")


def test_recomputation_is_named_where_it_would_fit():
    assert 'recompute="auto"' in refusal(STATE // 2 + 3 * KEPT)


def test_more_microbatches_are_named_where_they_would_fit():
    assert "about microbatches=" in refusal(STATE // 2 + 3 * KEPT)


def test_more_ranks_are_named_where_they_would_fit():
    assert "ranks=4" in refusal(STATE // 2 - 1, recompute="full", schedule="1f1b", partitioner="uniform")


def test_where_no_change_fits_it_is_the_ranks_that_are_too_small():
    assert "ranks with more memory" in refusal(10)
