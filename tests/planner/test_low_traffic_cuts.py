"""The search also tries cuts with fewer bytes, where messages take time and microbatches are few."""

from dataclasses import replace

import pytest

from penstock.ir import Cluster, Link, Profile, TensorSpec, Value
from penstock.planner import Measured, PlanOptions, search
from tests.planner.chains import SPEC, measured

NARROW = "layers.4"
RATE = SPEC.bytes / 11.0
"""a wide message takes almost as long as the passes of four layers, behind which it hides"""


def bottleneck() -> Measured:
    """Seven layers alike, of which the fifth makes little."""
    model = measured([1.0] * 7)
    little = Value(NARROW, TensorSpec((4, 1), requires_grad=True))
    nodes = tuple(replace(node, makes=(little,)) if node.name == NARROW else node for node in model.graph.nodes)
    graph = replace(model.graph, nodes=nodes)
    return Measured(graph, Profile(model.profile.costs, model.profile.step_seconds, graph.fingerprint, "made up"))


def sizes(cluster: Cluster) -> list[int]:
    made = search({4: bottleneck()}, PlanOptions(cluster, schedule="1f1b", partitioner="auto"))
    return [len(nodes) for nodes in made.partition.stages]


def test_without_messages_ranks_are_in_balance():
    assert sizes(Cluster(2)) in ([3, 4], [4, 3])


@pytest.mark.parametrize(
    "cluster",
    [Cluster(2, bandwidth=RATE), Cluster(2, links=(Link(0, 1, 0.0, RATE), Link(1, 0, 0.0, RATE)))],
    ids=["one figure", "named links"],
)
def test_few_microbatches_go_where_messages_are_short(cluster: Cluster):
    assert sizes(cluster) == [5, 2]
