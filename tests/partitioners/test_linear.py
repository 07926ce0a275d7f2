"""linear: even runs, even sums of ranks, few bytes, and speed that does not cost exactness."""

from itertools import combinations

import numpy as np
import pytest

from benchmarks.graphs import chain
from penstock.ir import Cluster, Graph, Node, NodeCost, Placement, Profile, TensorSpec, Value
from penstock.partitioners import Problem, divide
from penstock.partitioners.linear import Linear

LAYERS_AND_HEAD = [1] * 32 + [4]


def loads(costs, ranks, placement=None, **cluster):
    return divide("linear", Problem(*chain(costs), Cluster(ranks, **cluster), placement)).load_seconds


def test_a_heavy_node_in_the_middle_is_a_stage_with_nothing_heavy_beside_it():
    assert max(loads([1, 1, 1, 5, 1, 1, 1, 1, 1], 3)) == 5


@pytest.mark.parametrize("placement", [Placement.loop(8, 2), Placement.vee(8)])
def test_several_stages_per_rank_are_even_in_sum(placement):
    ideal = sum(LAYERS_AND_HEAD) / 8
    assert max(loads(LAYERS_AND_HEAD, 8, placement)) / ideal == pytest.approx(1.111, abs=0.001)


def test_three_stages_per_rank_are_near_to_even():
    costs = np.random.default_rng(3).random(200)
    assert max(loads(costs, 8, Placement.loop(8, 3))) <= 1.01 * costs.sum() / 8


@pytest.mark.parametrize("placement", [Placement.loop(2, 2), Placement.vee(2)])
@pytest.mark.parametrize("seed", range(3))
def test_two_stages_per_rank_of_many_atoms_are_within_a_thousandth_of_the_best_runs(placement, seed):
    costs = np.random.default_rng(seed).lognormal(size=70)
    added = np.concatenate(([0], np.cumsum(costs)))
    cuts = added[np.array(list(combinations(range(1, 70), 3))).T]
    runs = np.diff(np.stack((np.zeros(cuts.shape[1]), *cuts, np.full(cuts.shape[1], added[-1]))), axis=0)
    first = runs[np.array(placement.ranks) == 0].sum(axis=0)
    best = np.maximum(first, added[-1] - first).min()
    division = divide("linear", Problem(*chain(costs), Cluster(2), placement))
    assert best * (1 - 1e-12) <= division.bottleneck_seconds <= 1.001 * best
    assert division.contiguous_bound_seconds <= best * (1 + 1e-12)


def test_a_free_placement_is_evened_out_too():
    assert max(loads([4, 4, 1, 1, 1, 1, 4, 4], 2, Placement((0, 1, 0, 1)))) == 10


def test_a_slow_rank_gets_less():
    assert loads([1] * 30, 2, slowness=(1.0, 2.0)) == (20.0, 20.0)


def test_thousands_of_nodes_are_cut_as_exactly_as_a_few():
    costs = np.random.default_rng(1).integers(0, 50, 3000)
    found = max(loads(costs, 16))
    least = np.full(len(costs) + 1, np.inf)
    least[0], added = 0, np.concatenate(([0], np.cumsum(costs)))
    for _ in range(16):
        least = np.array(
            [np.maximum(least[:end], added[end] - added[:end]).min(initial=np.inf) for end in range(len(added))]
        )
    assert found == least[-1]


def test_of_equally_even_cuts_the_one_with_fewest_bytes_is_taken():
    graph, profile = chain([1, 1, 0, 0, 1, 1], [9, 9, 5, 7, 9, 9])
    division = divide("linear", Problem(graph, profile, Cluster(2)))
    assert division.partition.stages == (("0", "1", "2"), ("3", "4", "5"))
    assert division.cut_bytes == 5


def test_slack_buys_fewer_bytes():
    graph, profile = chain([10, 10, 1, 19], [90, 90, 5, 90])
    assert divide("linear", Problem(graph, profile, Cluster(2))).load_seconds == (20.0, 20.0)
    division = Linear(slack=0.05)(Problem(graph, profile, Cluster(2)))
    assert (division.load_seconds, division.cut_bytes) == ((21.0, 19.0), 5)


def tied_chain(costs, first, last):
    """A chain whose first and last nodes, of the given numbers, use one tensor of 100 bytes."""
    nodes = tuple(
        Node(
            str(at),
            (f"v{at - 1}",) if at else ("x",),
            (Value(f"v{at}", TensorSpec((1,), "uint8")),),
            ("w",) * (at in (first, last)),
        )
        for at in range(len(costs))
    )
    graph = Graph(nodes, (Value("x", TensorSpec((1,))),), (), (Value("w", TensorSpec((100,), "uint8")),))
    profile = tuple(NodeCost(str(at), float(cost), 0.0, 0.0, 0.0) for at, cost in enumerate(costs))
    return graph, Profile(profile, 1.0, graph.fingerprint, "made up")


def test_users_of_one_parameter_are_in_one_stage_if_that_costs_no_time():
    graph, profile = tied_chain([1, 1, 1, 1, 6], 1, 2)
    together = divide("linear", Problem(graph, profile, Cluster(3)))
    assert together.partition.stage_of("1") == together.partition.stage_of("2")
    assert together.cut_bytes == 2
    graph, profile = tied_chain([4, 1, 1, 4], 1, 2)
    apart = divide("linear", Problem(graph, profile, Cluster(2)))
    assert apart.load_seconds == (5.0, 5.0)
    assert apart.cut_bytes == 1 + 100


def test_users_of_one_parameter_on_the_ends_of_a_vee_are_on_one_rank():
    graph, profile = tied_chain([1, 1, 1, 1], 0, 3)
    assert divide("linear", Problem(graph, profile, Cluster(2), Placement.vee(2))).cut_bytes == 2
    assert divide("linear", Problem(graph, profile, Cluster(2), Placement.loop(2, 2))).cut_bytes == 3 + 100
