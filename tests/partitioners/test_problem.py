"""A problem that contradicts itself is refused at the door, and a division tells what is proven."""

from dataclasses import replace

import pytest

from benchmarks.graphs import chain
from penstock.errors import GraphError, PartitionError
from penstock.ir import Cluster, Placement
from penstock.partitioners import Acyclic, Holding, Linear, Metis, MPipe, Problem, assess, divide, moves, uniform

GRAPH, PROFILE = chain([1, 1, 1, 5, 1, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"placement": Placement.vee(2)}, r"the placement is for other ranks \(placement: 2, cluster: 3\)"),
        ({"holding": Holding((1, 2))}, r"microbatches in flight need one figure per stage \(figures: 2, stages: 3\)"),
        ({"together": ("1", "2")}, "given as groups of names"),
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


@pytest.mark.parametrize("wrong", [{"in_flight": 0}, {"in_flight": ()}, {"optimizer_copies": -1}])
def test_what_is_held_must_be_whole_numbers(wrong):
    with pytest.raises(PartitionError):
        Holding(**wrong)


@pytest.mark.parametrize(
    ("member", "options"),
    [
        (Linear, {"slack": -0.1}),
        (Acyclic, {"ideals": 0}),
        (Acyclic, {"attempts": 0.5}),
        (Metis, {"attempts": 0}),
        (MPipe, {"stages_per_rank": 0}),
        (MPipe, {"worth": float("nan")}),
    ],
)
def test_options_out_of_range_are_refused(member, options):
    with pytest.raises(PartitionError):
        member(**options)


def test_a_division_says_how_good_it_is():
    even = Problem(GRAPH, PROFILE, Cluster(3))
    assert str(divide("linear", even)) == (
        "5 s on the busiest of 3 ranks, at least 5 s needed: runs of the model's order, even in seconds; "
        "no partition is better"
    )
    mixed = divide("linear", Problem(*chain([4] * 8 + [1] * 8), Cluster(4)))
    assert mixed.proof == "no cut into runs is better; no partition is better by more than 16.7%"
    assert divide("uniform", even).proof == "no partition is better by more than 28.6%"


def test_a_given_partition_is_assessed_like_our_own():
    problem = Problem(GRAPH, PROFILE, Cluster(3))
    division = assess(problem, uniform(GRAPH, 3))
    assert division.partition == uniform(GRAPH, 3)
    assert division.load_seconds == (3.0, 7.0, 3.0)
    assert division.why == "given"


def test_a_given_partition_is_refused_if_it_does_not_fit_the_problem():
    with pytest.raises(PartitionError, match=r"another number of stages \(partition: 2, problem: 3\)"):
        assess(Problem(GRAPH, PROFILE, Cluster(3)), uniform(GRAPH, 2))
    with pytest.raises(PartitionError, match=r"must stay together \(nodes: \['2', '3'\], stages: \[0, 1\]\)"):
        assess(Problem(GRAPH, PROFILE, Cluster(3), together=(("2", "3"),)), uniform(GRAPH, 3))
    with pytest.raises(PartitionError, match="the cut exceeds the limits of memory"):
        assess(Problem(GRAPH, PROFILE, Cluster(3, memory=1), holding=Holding(in_flight=2)), uniform(GRAPH, 3))


def test_moving_a_cut_by_one_node_is_told_with_what_it_gives():
    problem = Problem(GRAPH, PROFILE, Cluster(3))
    found = {(move.node, move.target): move.bottleneck_seconds for move in moves(problem, uniform(GRAPH, 3))}
    assert found == {("2", 1): 8.0, ("3", 0): 8.0, ("5", 2): 6.0, ("6", 1): 8.0}


def test_a_module_stands_for_its_nodes():
    nodes = [replace(node, module=f"m.{at // 3}") for at, node in enumerate(GRAPH.nodes)]
    graph = replace(GRAPH, nodes=tuple(nodes))
    profile = replace(PROFILE, fingerprint=graph.fingerprint)
    division = divide("linear", Problem(graph, profile, Cluster(3), together=(("m.0",), ("m.1",), ("m.2",))))
    assert division.partition.stages == (("0", "1", "2"), ("3", "4", "5"), ("6", "7", "8"))


def test_another_placement_takes_over_what_is_known():
    problem = Problem(GRAPH, PROFILE, Cluster(3), holding=Holding(in_flight=(3, 2, 1)))
    other = problem.on(Placement.vee(3))
    assert other.atoms is problem.atoms
    assert other.in_flight.tolist() == [3.0] * 6
    assert Problem.stages(GRAPH, PROFILE, 4).num_stages == 4
    with pytest.raises(PartitionError, match="must be a whole number, 1 or more"):
        Problem.stages(GRAPH, PROFILE, 0)
