"""estimate: figures for a graph that nobody has measured."""

from penstock.planner import estimate
from tests.planner.test_make import chain


def test_every_node_has_a_cost_and_the_step_is_their_sum():
    graph = chain(3)
    profile = estimate(graph)
    profile.check(graph)
    assert [cost.node for cost in profile.costs] == ["layers.0", "layers.1", "layers.2"]
    assert profile.step_seconds == profile.seconds


def test_a_backward_costs_twice_a_forward_where_weights_are_trained():
    cost = estimate(chain(1))["layers.0"]
    assert cost.backward == 2 * cost.forward
    assert cost.memory.outputs == 4 * 8 * 4
