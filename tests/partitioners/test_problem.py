"""Problems that contradict themselves are refused, and a division states what is proven."""

from dataclasses import replace

import pytest

from benchmarks.graphs import chain
from penstock.errors import GraphError, PartitionError
from penstock.ir import Cluster, Placement
from penstock.partitioners import Problem, divide, find

GRAPH, PROFILE = chain([1, 1, 1, 5, 1, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"placement": Placement.vee(2)}, r"the same number of ranks \(placement: 2, cluster: 3\)"),
        ({"in_flight": (1, 2)}, r"must be given once per stage \(got: 2, stages: 3\)"),
        ({"together": ("1", "2")}, "must be groups of names"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, problem):
    with pytest.raises(PartitionError, match=problem):
        Problem(GRAPH, PROFILE, Cluster(3), **options)


def test_a_profile_of_another_graph_is_refused():
    with pytest.raises(GraphError, match="another graph"):
        Problem(GRAPH, replace(PROFILE, fingerprint="other"), Cluster(3))


def test_an_unknown_node_to_keep_together_is_answered_with_the_nearest():
    graph, profile = chain([1] * 12)
    with pytest.raises(
        PartitionError, match=r"no such node or module to keep together \(name: '111'\)\ntry: did you mean"
    ):
        divide("linear", Problem(graph, profile, Cluster(2), together=(("3", "111"),)))


@pytest.mark.parametrize("wrong", [{"in_flight": 0}, {"in_flight": ()}, {"training": "adamw"}])
def test_memory_takes_whole_numbers_and_a_training_state(wrong):
    with pytest.raises(PartitionError):
        Problem(GRAPH, PROFILE, Cluster(3), **wrong)


@pytest.mark.parametrize(
    ("member", "options"),
    [
        ("linear", {"slack": -0.1}),
        ("acyclic", {"ideals": 0}),
        ("acyclic", {"attempts": 0.5}),
        ("metis", {"attempts": 0}),
        ("mpipe", {"stages_per_rank": 0}),
        ("mpipe", {"worth": float("nan")}),
    ],
)
def test_options_out_of_range_are_refused(member, options):
    with pytest.raises(PartitionError, match="must be a"):
        find(member)(**options)


def test_a_division_states_how_good_it_is():
    even = Problem(GRAPH, PROFILE, Cluster(3))
    assert str(divide("linear", even)) == (
        "5 s on the busiest of 3 ranks, at least 5 s needed: runs of the model's order, even in seconds; "
        "no partition is better"
    )
    mixed = divide("linear", Problem(*chain([4] * 8 + [1] * 8), Cluster(4)))
    assert mixed.proof == "no cut into runs is better; no partition is better by more than 16.7%"
    assert divide("uniform", even).proof == "no partition is better by more than 28.6%"


def test_a_module_stands_for_its_nodes():
    nodes = [replace(node, module=f"m.{at // 3}") for at, node in enumerate(GRAPH.nodes)]
    graph = replace(GRAPH, nodes=tuple(nodes))
    profile = replace(PROFILE, fingerprint=graph.fingerprint)
    division = divide("linear", Problem(graph, profile, Cluster(3), together=(("m.0",), ("m.1",), ("m.2",))))
    assert division.partition.stages == (("0", "1", "2"), ("3", "4", "5"), ("6", "7", "8"))


def test_a_problem_for_another_placement_keeps_its_atoms():
    problem = Problem(GRAPH, PROFILE, Cluster(3), in_flight=(3, 2, 1))
    other = problem.on(Placement.vee(3))
    assert other.atoms is problem.atoms
    assert other.in_flight_of.tolist() == [3.0] * 6
