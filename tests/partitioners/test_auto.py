"""auto: the best of the others, as the table has them."""

from dataclasses import replace

import pytest

from benchmarks.graphs import chain
from penstock.errors import PartitionError
from penstock.ir import Cluster, Partition, Placement
from penstock.partitioners import PARTITIONERS, Division, Partitioner, Problem, divide, find
from tests.partitioners.examples import outcome, wild


@pytest.fixture(autouse=True)
def without_metis(monkeypatch):
    """So that the choice does not depend on what is installed."""
    monkeypatch.setattr(find("metis"), "is_available", lambda: False)


@pytest.mark.untraced
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


def test_if_nothing_fits_the_error_names_the_shortage():
    with pytest.raises(PartitionError, match="no cut was found that keeps the limits of memory"):
        divide("auto", Problem(*chain([1, 1], [50, 50]), Cluster(2, memory=3)))


class FirstNode(Partitioner):
    """A partitioner that is in no table: one node in every stage but the last."""

    name = "first_node"

    def divide(self, problem: Problem) -> Division:
        nodes = [node.name for node in problem.graph.nodes]
        last = problem.num_stages - 1
        stages = (*((name,) for name in nodes[:last]), tuple(nodes[last:]))
        return replace(divide("linear", problem), partition=Partition(stages), load_seconds=(0.5,) * last + (1.0,))


def test_a_new_member_of_the_table_takes_part(monkeypatch):
    monkeypatch.setitem(PARTITIONERS, "first_node", FirstNode)
    division = divide("auto", Problem(*chain([1] * 16), Cluster(4)))
    assert division.why.startswith("first_node: ")
    assert "linear 300.0%" in division.why
