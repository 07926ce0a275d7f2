"""Profile: costs by node, and for which graph they hold."""

import math
from dataclasses import replace

import pytest

from penstock.errors import GraphError
from penstock.ir import Graph, Node, NodeBytes, NodeCost, Profile, SavedTensors, TensorSpec, Value

X, Y, Z = (Value(name, TensorSpec((2,), requires_grad=True)) for name in "xyz")
GRAPH = Graph((Node("first", ("x",), (Y,)), Node("second", ("y",), (Z,))), (X,), ("z",))
FIRST, SECOND = NodeCost("first", 1.0, 2.0, 1.5, 1.0), NodeCost("second", 3.0, 4.0, 2.0, 2.5)
PROFILE = Profile((FIRST, SECOND), 10.0, GRAPH.fingerprint, "cpu", (("torch", "2.13.0"),))


def test_costs_are_found_by_node():
    assert PROFILE["second"] is SECOND
    assert len(PROFILE) == 2


def test_an_unknown_node_is_named():
    with pytest.raises(GraphError, match=r"the profile has no such node \(node: 'third'\)"):
        PROFILE["third"]


def test_the_sum_is_of_forwards_and_full_backwards():
    assert PROFILE.seconds == 10.0


def test_a_profile_fits_the_graph_that_it_was_measured_for():
    PROFILE.check(GRAPH)


def test_other_shapes_need_another_profile():
    other = replace(GRAPH, inputs=(Value("x", TensorSpec((3,))),))
    with pytest.raises(GraphError, match="measured for another graph or other shapes"):
        PROFILE.check(other)


def test_a_profile_without_a_node_of_the_graph_does_not_fit():
    with pytest.raises(GraphError, match=r"lacks nodes of the graph \(lacking: 1, first: 'second'\)"):
        replace(PROFILE, costs=(FIRST,)).check(GRAPH)


def test_a_node_has_one_cost():
    with pytest.raises(GraphError, match=r"a node must have one cost only \(node: 'first', costs: 2\)"):
        replace(PROFILE, costs=(FIRST, SECOND, FIRST))


@pytest.mark.parametrize("name", ["forward", "backward", "input_grad", "weight_grad"])
@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_seconds_are_finite_and_not_negative(name, seconds):
    with pytest.raises(GraphError, match=f"{name} must be finite seconds"):
        replace(FIRST, **{name: seconds})


def test_the_step_takes_finite_seconds():
    with pytest.raises(GraphError, match="step seconds must be finite"):
        replace(PROFILE, step_seconds=math.nan)


def test_bytes_are_not_negative():
    with pytest.raises(GraphError, match=r"peak must be bytes, 0 or more \(bytes: -1\)"):
        NodeBytes(peak=-1)


def test_more_may_wait_for_the_weight_gradient_than_was_kept_as_gradients_wait_too():
    assert NodeBytes(kept=1, kept_for_weight_grad=2).kept_for_weight_grad == 2


@pytest.mark.parametrize("name", ["own", "late_own"])
def test_nothing_less_than_nothing_is_held(name):
    with pytest.raises(GraphError, match=rf"{name} must be bytes, 0 or more \(bytes: -1\)"):
        SavedTensors(**{name: -1})


def test_equal_profiles_are_equal_and_hash_alike():
    assert replace(PROFILE) == PROFILE
    assert hash(replace(PROFILE)) == hash(PROFILE)


def test_costs_of_a_loss_are_added_to_the_last_node():
    spec = TensorSpec((2,))
    layer, loss = (Node(name, (read,), (Value(name, spec),)) for name, read in (("layer", "x"), ("loss", "layer")))
    plain, scored = (Graph(nodes, (Value("x", spec),), (nodes[-1].name,)) for nodes in ((layer,), (layer, loss)))
    costs = (NodeCost("layer", 1.0, 2.0, 1.0, 1.0, flops=100.0), NodeCost("loss", 0.5, 1.0, 0.5, 0.5, flops=10.0))
    profile = Profile(costs, 4.5, scored.fingerprint, "cpu").with_loss_in_output(plain)
    assert profile.costs == (NodeCost("layer", 1.5, 3.0, 2.0, 1.0, flops=110.0),)
    assert profile.model_flops == 330.0
    profile.check(plain)
