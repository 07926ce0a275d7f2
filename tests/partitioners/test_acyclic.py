"""acyclic: partitions that are not runs of the model's order."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from benchmarks.graphs import chain
from penstock.ir import Cluster, NodeBytes, Placement
from penstock.partitioners import Problem, divide
from penstock.partitioners.acyclic import Acyclic
from penstock.partitioners.search.ideals import all_ideals
from penstock.partitioners.search.multilevel import join_idle_atoms, other_orders, pair_up
from tests.partitioners.examples import branches, outcome, wild
from tests.selection import alternated


def test_branches_are_put_where_they_even_out():
    graph, profile = branches(3, 4)
    division = divide("acyclic", Problem(graph, profile, Cluster(3)))
    division.partition.check(graph)
    assert division.bottleneck_seconds == 5
    assert division.why.startswith("all partitions compared")


@pytest.mark.untraced
def test_the_search_comes_near_to_what_all_partitions_give(is_whole):
    for seed in range(6 if is_whole else 3):
        problem = Problem(*wild(seed, 22), Cluster(3))
        exact, search = Acyclic(ideals=100_000)(problem), Acyclic(ideals=1)(problem)
        assert search.why.startswith("nodes moved between")
        assert exact.lower_bound_seconds == pytest.approx(exact.bottleneck_seconds)
        assert search.bottleneck_seconds <= 1.05 * exact.bottleneck_seconds


@pytest.mark.untraced
@pytest.mark.parametrize(
    ("placement", "bandwidth"), alternated(list(product([None, Placement.vee(3), Placement.loop(3, 2)], [None, 15.0])))
)
def test_it_is_never_worse_than_cuts_into_runs(placement, bandwidth):
    for seed in range(2):
        problem = Problem(*wild(seed, 16), Cluster(3, bandwidth=bandwidth), placement)
        best = min(outcome(divide(name, problem)) for name in ("linear", "pipedream"))
        assert outcome(divide("acyclic", problem)) <= best


def test_limits_that_no_run_can_keep_are_kept_by_another_partition():
    graph, profile = branches(3, 3)
    costs = tuple(replace(cost, memory=NodeBytes(kept=4)) for cost in profile.costs)
    # Room for two branches, and for the third with what comes from them; runs of the order begin all three.
    problem = Problem(graph, replace(profile, costs=costs), Cluster(2, memory=(24, 36)))
    division = divide("acyclic", problem)
    division.partition.check(graph)
    assert division.load_seconds == (6.0, 4.0)
    assert division.contiguous_bound_seconds == np.inf


def test_a_chain_has_as_many_ideals_as_places_and_branches_have_more():
    ladder = Problem(*chain([1] * 9), Cluster(1)).atoms
    assert len(all_ideals(ladder, 100)) == 10
    wide = Problem(*branches(3, 2), Cluster(1)).atoms
    assert len(all_ideals(wide, 100)) == 3**3 + 1
    assert all_ideals(wide, 20) is None


def test_nodes_that_take_no_time_are_joined_with_their_only_neighbour():
    atoms = Problem(*chain([0, 3, 0, 0, 2, 0]), Cluster(1)).atoms
    assert len(set(join_idle_atoms(atoms, 2).tolist())) == 2
    assert join_idle_atoms(atoms, 3).tolist() == [0, 1, 2, 3, 4, 5]


def test_joined_atoms_still_have_an_order_in_which_they_can_run():
    for seed in range(20):
        atoms = Problem(*wild(seed, 30), Cluster(1)).atoms
        joined = atoms.merged(pair_up(atoms, heaviest=8.0))
        assert len(joined) <= len(atoms)
        assert (joined.edges.item < joined.edges.atom).all()
        assert joined.seconds.sum() == pytest.approx(atoms.seconds.sum())


def test_other_orders_can_run_too():
    for seed in range(10):
        atoms = Problem(*wild(seed, 30), Cluster(1)).atoms
        for position in other_orders(atoms, 4):
            assert sorted(position.tolist()) == list(range(len(atoms)))
            assert (position[atoms.edges.item] < position[atoms.edges.atom]).all()
