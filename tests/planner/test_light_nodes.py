"""No stage of a view or a norm alone, where a heavier node is beside it."""

from dataclasses import replace

import pytest

from penstock.ir import Cluster, Placement, TensorSpec
from penstock.partitioners import Problem
from penstock.planner import PlanOptions, search
from penstock.planner.candidates import light_groups
from tests.planner.chains import measured

LAYER, LIGHT = 4e-3, 1e-5


@pytest.mark.parametrize("seconds", [[*[LAYER] * 7, LIGHT, LIGHT, LAYER], [*[LAYER] * 8, LIGHT], [LIGHT, *[LAYER] * 8]])
def test_a_light_node_stays_with_a_heavier_one(seconds):
    plan = search({8: measured(seconds)}, PlanOptions(4, schedule="interleaved", stages_per_rank=2, budget_seconds=0.5))
    assert plan.num_stages == 8
    for stage in plan.partition.stages:
        assert any(seconds[int(name.removeprefix("layers."))] == LAYER for name in stage)


def test_there_may_be_no_other_way():
    seconds = [LAYER, LAYER, LAYER, LIGHT]
    plan = search({4: measured(seconds)}, PlanOptions(4, schedule="1f1b", budget_seconds=0.0))
    assert [len(stage) for stage in plan.partition.stages] == [1] * 4


def test_nodes_that_are_all_small_are_not_joined():
    graph, profile = measured([1e-3] * 40)
    assert light_groups(Problem(graph, profile, Cluster(2), Placement.loop(2))) == ()


def test_a_light_node_joins_the_side_to_which_more_bytes_are_sent():
    # A bottleneck: the value between the two light nodes is the smallest.
    graph, profile = measured([LAYER, LAYER, LIGHT, LIGHT, LAYER, LAYER])
    narrow = graph["layers.2"]
    value = replace(narrow.makes[0], spec=TensorSpec((4, 1), requires_grad=True))
    nodes = tuple(replace(node, makes=(value,)) if node is narrow else node for node in graph.nodes)
    graph = replace(graph, nodes=nodes)
    problem = Problem(graph, replace(profile, fingerprint=graph.fingerprint), Cluster(2), Placement.loop(2))
    assert light_groups(problem) == (("layers.2", "layers.1"), ("layers.3", "layers.4"))
