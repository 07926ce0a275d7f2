"""What every partitioner of the table promises."""

from dataclasses import replace

import pytest

from benchmarks.graphs import chain
from penstock.errors import PartitionError
from penstock.ir import Cluster, Placement, StorageGroup, TrainingState, Update, Value, compute_stage_costs
from penstock.partitioners import PARTITIONERS, Problem, divide, find
from tests.partitioners.examples import wild

PLACEMENTS = {
    "one stage per rank": Placement.loop(3),
    "loop": Placement.loop(3, 2),
    "vee": Placement.vee(3),
    "any": Placement((0, 1, 0, 2, 1)),
}


@pytest.fixture(params=PARTITIONERS)
def name(request):
    if request.param == "metis":
        pytest.importorskip("pymetis")
    return request.param


@pytest.mark.untraced
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stages_are_legal_as_many_as_placed_and_never_below_their_bounds(name, placement):
    graph, profile = wild(1, 16)
    division = divide(name, Problem(graph, profile, Cluster(3, bandwidth=20.0), PLACEMENTS[placement]))
    division.partition.check(graph)
    assert division.partition.num_stages == len(PLACEMENTS[placement])
    assert division.placement == PLACEMENTS[placement]
    assert 0 < division.lower_bound_seconds <= division.bottleneck_seconds
    assert division.lower_bound_seconds <= division.contiguous_bound_seconds


@pytest.mark.untraced
def test_loads_are_the_sums_of_the_stages_of_a_rank(name):
    graph, profile = wild(7, 18)
    division = divide(name, Problem(graph, profile, Cluster(3), Placement.vee(3)))
    costs = compute_stage_costs(graph, profile, division.partition)
    stages = [forward + backward for forward, backward in zip(costs.forward, costs.backward, strict=True)]
    sums = [sum(stages[stage] for stage in held) for held in division.placement.stages]
    assert division.load_seconds == pytest.approx(sums)


@pytest.mark.untraced
def test_the_same_problem_has_the_same_division(name):
    graph, profile = wild(4, 14)
    problem = Problem(graph, profile, Cluster(4, bandwidth=9.0))
    assert divide(name, problem) == divide(name, replace(problem))


def test_a_single_stage_is_the_whole_model(name):
    graph, profile = chain([1, 2, 3])
    division = divide(name, Problem(graph, profile, Cluster(1)))
    assert division.partition.stages == (("0", "1", "2"),)
    assert division.proof == "no partition is better"


def test_as_many_stages_as_nodes_are_one_node_each(name):
    division = divide(name, Problem(*chain([1, 0, 0, 5]), Cluster(4)))
    assert division.partition.stages == (("0",), ("1",), ("2",), ("3",))


def test_more_stages_than_places_to_cut_are_refused(name):
    with pytest.raises(
        PartitionError, match=r"at most 3 stages in all \(places: 2, stages: 4, modules: .*0, .*1, .*2\)"
    ) as caught:
        divide(name, Problem(*chain([1, 2, 3]), Cluster(4)))
    assert "try: at most 3 ranks with one stage each" in str(caught.value)


def test_memory_that_is_written_and_state_that_is_written_are_never_cut(name):
    graph, profile = chain([3, 1, 1, 3, 1, 1, 3, 3])
    nodes = [replace(node, buffers=("count",)) if node.name in ("4", "5") else node for node in graph.nodes]
    graph = replace(
        graph,
        nodes=tuple(nodes),
        buffers=(Value("count", graph.spec("0")),),
        storage=(StorageGroup(("1", "2"), ("2",)),),
        updates=(Update("5", ("count",)),),
    )
    division = divide(name, Problem(graph, replace(profile, fingerprint=graph.fingerprint), Cluster(6)))
    division.partition.check(graph)
    assert division.partition.stages == (("0",), ("1", "2"), ("3",), ("4", "5"), ("6",), ("7",))


def test_nodes_are_kept_together_if_asked(name):
    problem = Problem(*chain([1] * 9), Cluster(3), together=(("1", "2"), ("5", "6", "7")))
    stage_of = divide(name, problem).partition.stage_of
    assert stage_of("1") == stage_of("2")
    assert stage_of("5") == stage_of("6") == stage_of("7")


@pytest.mark.untraced
def test_no_rank_exceeds_its_memory_or_the_error_names_the_shortage(name):
    graph, profile = wild(3, 14)
    memory = {"in_flight": 2, "training": TrainingState("adamw")}
    division = divide(name, Problem(graph, profile, Cluster(4, memory=800), **memory))
    costs = compute_stage_costs(graph, profile, division.partition, training=TrainingState("adamw"))
    held = [each.total + 2 * kept for each, kept in zip(costs.state, costs.activation_bytes, strict=True)]
    assert max(sum(held[stage] for stage in stages) for stages in division.placement.stages) <= 800
    with pytest.raises(
        PartitionError, match=r"limits of memory \(rank: \d, needs: \d+, limit: 200, short by: \d+, all"
    ):
        divide(name, Problem(graph, profile, Cluster(4, memory=200), **memory))


@pytest.mark.parametrize("given", ["PipeDream", "pipe-dream", "PIPE_DREAM"])
def test_case_and_punctuation_of_names_do_not_matter(given):
    assert find(given).name == "pipedream"


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(
        PartitionError, match=r"unknown partitioner \(name: 'metiss'\)\ntry: did you mean metis\? one of"
    ):
        find("metiss")


def test_members_go_by_their_names():
    assert [member.name for member in PARTITIONERS.values()] == list(PARTITIONERS)
