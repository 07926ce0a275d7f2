"""mpipe: stages of one rank need not be neighbours."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.graphs import chain
from penstock.ir import Cluster, Placement
from penstock.partitioners import Problem, divide
from penstock.partitioners.mpipe import MPipe, assign_ranks, block_of, pieces

HEAVY_THEN_LIGHT = [4] * 8 + [1] * 8


def test_heavy_and_light_blocks_are_mixed_until_ranks_are_even():
    division = divide("mpipe", Problem(*chain(HEAVY_THEN_LIGHT), Cluster(4)))
    assert division.load_seconds == (10.0, 10.0, 10.0, 10.0)
    assert division.partition.num_stages == division.placement.num_stages == 8
    assert divide("linear", Problem(*chain(HEAVY_THEN_LIGHT), Cluster(4))).bottleneck_seconds == 12


def test_one_stage_per_rank_is_kept_where_more_bring_nothing():
    assert divide("mpipe", Problem(*chain([1] * 16), Cluster(4))).placement == Placement.loop(4)


def test_more_stages_must_be_worth_it():
    assert MPipe(worth=0.2)(Problem(*chain(HEAVY_THEN_LIGHT), Cluster(4))).placement == Placement.loop(4)
    assert MPipe(stages_per_rank=1)(Problem(*chain(HEAVY_THEN_LIGHT), Cluster(4))).bottleneck_seconds == 12


def test_a_given_placement_is_kept():
    problem = Problem(*chain(HEAVY_THEN_LIGHT), Cluster(4), Placement.vee(4))
    assert divide("mpipe", problem).placement == Placement.vee(4)


def test_a_free_placement_is_found_where_loops_and_vees_are_uneven():
    costs = [6, 1, 1, 6, 1, 1, 1, 1, 6, 1, 1, 1]
    division = divide("mpipe", Problem(*chain(costs), Cluster(3), in_flight=(1, 1, 1)))
    assert division.bottleneck_seconds == pytest.approx(sum(costs) / 3)


def test_a_block_is_named_up_to_its_number():
    assert [block_of(name) for name in ("model.layers.3.mlp", "layers.11", "head", "")] == [
        "model.layers.3",
        "layers.11",
        "head",
        "",
    ]


def test_pieces_are_blocks_joined_where_they_are_light():
    graph, profile = chain([1, 1, 5, 5, 2, 2, 3])
    modules = ["a.0.x", "a.0.y", "a.1.x", "a.1.y", "a.2.x", "a.2.y", "b"]
    nodes = [replace(node, module=module) for node, module in zip(graph.nodes, modules, strict=True)]
    graph = replace(graph, nodes=tuple(nodes))
    atoms = Problem(graph, replace(profile, fingerprint=graph.fingerprint), Cluster(1)).atoms
    assert pieces(graph, atoms, 4) == [0, 2, 4, 6, 7]
    assert pieces(graph, atoms, 3) == [0, 2, 4, 7]
    assert pieces(graph, atoms, 6) == [0, 2, 3, 4, 5, 6, 7]


def test_the_heaviest_pieces_are_assigned_first_and_neighbours_stay_together_if_they_can():
    assert assign_ranks(np.array([3.0, 9.0, 3.0, 3.0]), 2) == [1, 0, 1, 1]
    assert assign_ranks(np.array([2.0, 2.0, 2.0, 2.0]), 2) == [0, 1, 1, 0]
