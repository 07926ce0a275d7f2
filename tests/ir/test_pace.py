"""Pace: ranks of unequal speed, and figures that make no sense of them."""

import math

import pytest

from penstock.errors import CostError
from penstock.ir import Cluster, Placement, from_json, to_json


def test_every_stage_is_as_slow_as_the_rank_that_holds_it():
    assert Cluster(2, slowness=[1, 1.8]).slowness_of(Placement.vee(2)) == (1.0, 1.8, 1.8, 1.0)
    assert Cluster(2).slowness_of(Placement.loop(2)) == (1.0, 1.0)


def test_slowness_is_saved_with_the_cluster():
    cluster = Cluster(3, slowness=(1, 2, 1))
    assert from_json(to_json(cluster)) == cluster != Cluster(3)


def test_a_placement_on_other_ranks_is_refused():
    with pytest.raises(CostError, match=r"another number of ranks \(cluster: 2, placement: 3\)"):
        Cluster(2, slowness=(1, 2)).slowness_of(Placement.loop(3))


@pytest.mark.parametrize(
    ("slowness", "problem"),
    [
        ((1.0,), r"one factor per rank \(factors: 1, ranks: 2\)"),
        (2.0, r"one factor per rank \(slowness: 2.0, ranks: 2\)"),
        ("12", "one factor per rank"),
        ((1.0, 0.0), "finite and above 0"),
        ((1.0, math.inf), "finite and above 0"),
        ((1.0, "2"), r"(?s)finite and above 0.*try: slowness=\(1, 1.8\)"),
    ],
)
def test_slowness_that_makes_no_sense_is_refused(slowness, problem):
    with pytest.raises(CostError, match=problem):
        Cluster(2, slowness=slowness)
