"""auto: the best of the others, and by how much."""

import pytest

from benchmarks.graphs import chain
from penstock.errors import PartitionError
from penstock.ir import Cluster, Placement
from penstock.partitioners import PARTITIONERS, Problem, divide
from penstock.partitioners import auto as member
from tests.partitioners.examples import outcome, wild


@pytest.fixture(autouse=True)
def without_metis(monkeypatch):
    """So that the choice does not depend on what is installed."""
    monkeypatch.setattr(member, "is_installed", lambda: False)


@pytest.mark.parametrize("placement", [Placement.loop(3), Placement.vee(3)])
def test_no_other_partitioner_is_better(placement):
    problem = Problem(*wild(2, 12), Cluster(3, bandwidth=10.0), placement)
    others = [outcome(divide(name, problem)) for name in PARTITIONERS if name not in ("auto", "metis")]
    assert outcome(divide("auto", problem)) == min(others)


def test_the_choice_is_explained():
    division = divide("auto", Problem(*chain([4] * 8 + [1] * 8), Cluster(4)))
    assert division.why == "mpipe: 2 stages per rank, evened out over the ranks; longer by: linear 20.0%, acyclic 20.0%"


def test_more_stages_are_not_taken_for_nothing():
    assert divide("auto", Problem(*chain([1] * 16), Cluster(4))).placement == Placement.loop(4)


def test_if_nothing_fits_the_error_says_what_is_short():
    with pytest.raises(PartitionError, match="no cut was found that keeps the limits of memory"):
        divide("auto", Problem(*chain([1, 1], [50, 50]), Cluster(2, memory=3)))
