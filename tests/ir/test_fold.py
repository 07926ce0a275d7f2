"""fold: the costs of the nodes, added up over stages."""

import pytest

from penstock.errors import GraphError
from penstock.ir import (
    Graph,
    MessageCost,
    Node,
    NodeBytes,
    NodeCost,
    Partition,
    Profile,
    StateBytes,
    TensorSpec,
    Value,
    compute_stage_costs,
)


def value(name, size, requires_grad=True):
    return Value(name, TensorSpec((size,), "uint8", requires_grad))


GRAPH = Graph(
    nodes=(
        Node("mask", ("x",), (value("mask", 1, False),), from_inputs=True),
        Node("embed", ("x",), (value("embed", 20),), ("embed.weight",), ("embed.scale",)),
        Node("block", ("embed", "mask"), (value("block", 30),), ("block.weight",)),
        Node("head", ("block", "embed", "mask"), (value("head", 40),), ("head.weight",)),
    ),
    inputs=(value("x", 10, False),),
    outputs=("head",),
    parameters=(value("embed.weight", 100), value("block.weight", 200, requires_grad=False), value("head.weight", 100)),
    buffers=(value("embed.scale", 7, False),),
    tied=(("embed.weight", "head.weight"),),
)
COSTS = (
    NodeCost("mask", 1.0, 0.0, 0.0, 0.0),
    NodeCost("embed", 10.0, 20.0, 12.0, 13.0, NodeBytes(kept=1000, kept_for_weight_grad=600)),
    NodeCost("block", 100.0, 200.0, 120.0, 130.0, NodeBytes(kept=2000, kept_for_weight_grad=0)),
    NodeCost("head", 1000.0, 2000.0, 1200.0, 1300.0, NodeBytes(kept=4000, kept_for_weight_grad=4000)),
)
PROFILE = Profile(COSTS, 3331.0, GRAPH.fingerprint, "cpu")
TWO = Partition((("mask", "embed", "block"), ("head",)))


def test_seconds_add_up_and_what_runs_twice_is_paid_twice():
    costs = compute_stage_costs(GRAPH, PROFILE, TWO)
    assert costs.forward == (111.0, 1001.0)
    assert costs.backward == (220.0, 2000.0)
    assert (costs.input_grad[1], costs.weight_grad[1]) == (1200.0, 1300.0)


def test_a_stage_that_returns_no_gradient_does_all_of_its_backward_as_a_weight_gradient():
    costs = compute_stage_costs(GRAPH, PROFILE, TWO)
    assert (costs.input_grad[0], costs.weight_grad[0]) == (0.0, 220.0)


def test_such_a_stage_keeps_everything_until_then_and_the_gradients_that_came():
    assert compute_stage_costs(GRAPH, PROFILE, TWO).weight_grad_bytes[0] == 3000 + 50


def test_a_stage_holds_what_its_nodes_keep_and_what_it_receives():
    costs = compute_stage_costs(GRAPH, PROFILE, TWO)
    assert costs.activation_bytes == (3000, 4000 + 50)
    assert costs.weight_grad_bytes[1] == 4000 + 50


def test_messages_carry_what_crosses():
    assert compute_stage_costs(GRAPH, PROFILE, TWO).messages == (MessageCost(0, 1, 50, 50),)


def test_a_tied_tensor_is_held_by_every_stage_that_uses_it():
    first, last = compute_stage_costs(GRAPH, PROFILE, TWO).state
    assert first == StateBytes(parameters=100 + 200 + 7, gradients=100)
    assert last == StateBytes(parameters=100, gradients=100)


def test_a_tied_tensor_is_held_once_by_one_stage():
    whole = Partition((("mask", "embed", "block", "head"),))
    assert compute_stage_costs(GRAPH, PROFILE, whole).state == (StateBytes(parameters=307, gradients=100),)


def test_the_optimizer_holds_copies_of_what_is_trained():
    assert [state.optimizer for state in compute_stage_costs(GRAPH, PROFILE, TWO, optimizer_copies=2).state] == [
        200,
        200,
    ]


def test_a_profile_of_another_graph_is_refused():
    with pytest.raises(GraphError, match="measured for another graph"):
        compute_stage_costs(GRAPH, Profile(COSTS, 3331.0, "0" * 64, "cpu"), TWO)
