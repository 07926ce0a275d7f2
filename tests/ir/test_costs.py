"""StageCosts: checks, and seconds and bytes of stages from a profile and a partition."""

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import CostError, GraphError
from penstock.ir import (
    MAX_STAGES,
    Graph,
    Kind,
    MessageCost,
    Node,
    NodeBytes,
    NodeCost,
    Partition,
    Placement,
    Profile,
    SavedTensors,
    StageCosts,
    StateBytes,
    StorageGroup,
    TensorSpec,
    TrainingState,
    Update,
    Value,
    compute_stage_costs,
)


def test_a_full_backward_costs_both_parts_when_left_out():
    costs = StageCosts(forward=(1.0, 2.0), input_grad=(3.0, 4.0), weight_grad=(5.0, 6.0))
    assert costs.backward == (8.0, 10.0)


def test_uniform_costs_are_equal_stages():
    costs = StageCosts.uniform(2, forward=1.0, input_grad=2.0, weight_grad=3.0)
    assert (costs.forward, costs.input_grad, costs.weight_grad, costs.backward) == ((1, 1), (2, 2), (3, 3), (5, 5))


def test_bytes_are_zero_when_left_out():
    costs = StageCosts.uniform(2)
    assert (costs.activation_bytes, costs.weight_grad_bytes) == ((0, 0), (0, 0))
    assert costs.state == (StateBytes(), StateBytes())


def test_the_weight_gradient_needs_all_activations_by_default():
    costs = StageCosts((1.0,), (1.0,), (1.0,), activation_bytes=(7,))
    assert costs.weight_grad_bytes == (7,)


def test_lists_become_tuples_so_that_costs_are_keys():
    costs = StageCosts([1.0, 1.0], [1.0, 1.0], [1.0, 1.0], messages=[MessageCost(0, 1, 2, 3)])
    assert costs.messages == (MessageCost(0, 1, 2, 3),)
    assert hash(costs) == hash(StageCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, messages=(MessageCost(0, 1, 2, 3),)))


def test_a_message_has_bytes_there_and_back():
    costs = StageCosts((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, messages=(MessageCost(0, 2, 10, 4),))
    source, target = np.array([0, 2, 0, 1]), np.array([2, 0, 1, 2])
    assert costs.message_bytes(source, target).tolist() == [10, 4, 0, 0]


def test_without_message_costs_messages_have_no_bytes():
    assert StageCosts.uniform(2).message_bytes(np.array([0]), np.array([1])).tolist() == [0]


def test_state_adds_up():
    assert StateBytes(1, 2, 4).total == 7


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"forward": ()}, "number of stages must be from 1"),
        ({"forward": (1.0,) * (MAX_STAGES + 1)}, "number of stages must be from 1"),
        ({"input_grad": (1.0,)}, "input_grad must have one entry per stage"),
        ({"backward": (1.0,)}, "backward must have one entry per stage"),
        ({"forward": (1.0, -1.0)}, r"forward must be a finite number, 0 or more \(stage: 1, value: -1.0\)"),
        ({"weight_grad": (math.nan, 1.0)}, "weight_grad must be a finite number"),
        (
            {"forward": 1.0},
            r"(?s)forward must have one entry per stage \(got: 1.0\).*try: forward=\(1.0,\) \* num_stages",
        ),
        ({"input_grad": (1.0, "a")}, r"input_grad must be a finite number, 0 or more \(stage: 1, value: 'a'\)"),
        ({"weight_grad": (None, 1.0)}, r"weight_grad must be a finite number, 0 or more \(stage: 0, value: None\)"),
        ({"forward": (10**400, 1.0)}, "forward must be a finite number"),
        ({"state": (StateBytes(), 7)}, r"state must be a StateBytes record per stage \(stage: 1, got: 7\)"),
        ({"state": (StateBytes(), StateBytes("a"))}, "bytes of state must be 0 or more"),
        ({"messages": ((0, 1, 2, 3),)}, "messages must be MessageCost records"),
        ({"activation_bytes": (0, -1)}, "activation_bytes must be a finite number"),
        ({"state": (StateBytes(),)}, "state must have one entry per stage"),
        ({"state": (StateBytes(), StateBytes(optimizer=-1))}, "bytes of state must be 0 or more"),
        ({"messages": (MessageCost(1, 0, 1, 1),)}, "a message must lead from a stage to a later one"),
        ({"messages": (MessageCost(0, 2, 1, 1),)}, "a message must lead from a stage to a later one"),
        ({"messages": (MessageCost(0, 1, -1, 1),)}, "bytes of a message must be 0 or more"),
    ],
)
def test_costs_that_make_no_sense_are_refused(wrong, problem):
    right = {"forward": (1.0, 1.0), "input_grad": (1.0, 1.0), "weight_grad": (1.0, 1.0)}
    with pytest.raises(CostError, match=problem):
        StageCosts(**{**right, **wrong})


def test_passes_take_so_many_times_longer_stage_by_stage():
    longer = StageCosts((1.0, 2.0), (1.0, 2.0), (3.0, 4.0), (4.0, 5.0), (7, 8)).times((1.0, 1.5))
    assert longer == StageCosts((1.0, 3.0), (1.0, 3.0), (3.0, 6.0), (4.0, 7.5), (7, 8))
    with pytest.raises(CostError, match=r"the same number of stages \(costs: 2, factors: 1\)"):
        longer.times((1.0,))


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
    assert [state.optimizer for state in compute_stage_costs(GRAPH, PROFILE, TWO, TrainingState("adamw")).state] == [
        200,
        200,
    ]


def test_a_profile_of_another_graph_is_refused():
    with pytest.raises(GraphError, match="measured for another graph"):
        compute_stage_costs(GRAPH, Profile(COSTS, 3331.0, "0" * 64, "cpu"), TWO)


def saved_value(name, size):
    return Value(name, TensorSpec((size,), "uint8", requires_grad=True))


A, B, C = saved_value("a", 10), saved_value("b", 20), saved_value("c", 40)
SAVED_GRAPH = Graph(
    (Node("a", ("x",), (A,)), Node("b", ("a",), (B,)), Node("c", ("b",), (C,))), (saved_value("x", 1),), ("c",)
)
SAVED = {
    "a": SavedTensors(own=100),
    "b": SavedTensors(own=200, values=("a", "b"), late_own=7, late_values=("a",), late_gradients=("b",)),
    "c": SavedTensors(own=400, values=("b",), late_own=9, late_values=("b",), late_gradients=("c",)),
}
SAVED_COSTS = tuple(NodeCost(name, 1.0, 2.0, 1.0, 1.0, saved=holds) for name, holds in SAVED.items())
SAVED_PROFILE = Profile(SAVED_COSTS, 9.0, SAVED_GRAPH.fingerprint, "cpu", held=(("a", 10), ("b", 20)))


@pytest.mark.parametrize(
    ("stages", "kept"),
    [
        ("abc", [100 + 200 + 400 + 10 + 20]),
        ("ab c", [100 + 200 + 10 + 20, 400 + 20]),
        ("a bc", [100, 200 + 400 + 10 + 20]),
        ("a b c", [100, 200 + 10 + 20, 400 + 20]),
    ],
)
def test_a_stage_holds_a_value_once_if_one_of_its_nodes_does(stages, kept):
    partition = Partition(tuple(map(tuple, stages.split())))
    assert list(compute_stage_costs(SAVED_GRAPH, SAVED_PROFILE, partition).activation_bytes) == kept


def test_values_and_gradients_wait_for_the_weight_gradient():
    costs = compute_stage_costs(SAVED_GRAPH, SAVED_PROFILE, Partition((("a",), ("b", "c"))))
    assert costs.weight_grad_bytes == (100 + 10, 7 + 9 + 10 + 20 + 20 + 40)


def test_a_view_and_what_it_is_a_view_of_are_one_piece_of_memory():
    shared = replace(SAVED_GRAPH, storage=(StorageGroup(("a", "b")),))
    profile = replace(SAVED_PROFILE, fingerprint=shared.fingerprint, held=(("a", 10),))
    assert compute_stage_costs(shared, profile, Partition((("a", "b", "c"),))).activation_bytes == (
        100 + 200 + 400 + 10,
    )


def test_stages_of_one_rank_share_what_one_hands_the_other():
    costs = compute_stage_costs(
        SAVED_GRAPH, SAVED_PROFILE, Partition((("a", "b"), ("c",))), placement=Placement((0, 0))
    )
    assert costs.activation_bytes == (100 + 200 + 10 + 20, 400)


def test_memory_held_by_the_later_of_two_stages_of_one_rank_counts_for_that_stage():
    costs = compute_stage_costs(
        SAVED_GRAPH, SAVED_PROFILE, Partition((("a",), ("b", "c"))), placement=Placement((0, 0))
    )
    assert costs.activation_bytes == (100, 200 + 400 + 10 + 20)


BLOCKS = replace(
    SAVED_GRAPH,
    nodes=tuple(replace(node, module=node.name, kind="Block", is_block=True) for node in SAVED_GRAPH.nodes),
)
OF_BLOCKS = replace(SAVED_PROFILE, fingerprint=BLOCKS.fingerprint)


def test_blocks_that_are_recomputed_hold_what_they_read_and_take_another_forward():
    costs = compute_stage_costs(BLOCKS, OF_BLOCKS, Partition((("a",), ("b", "c"))), recomputed=(1,))
    assert costs.activation_bytes == (100, 10 + 20)
    assert (costs.backward, costs.input_grad[1], costs.weight_grad[1]) == ((2.0, 4.0 + 2.0), 2.0 + 2.0, 2.0)


def test_whatever_adds_to_the_forward_of_a_block_adds_to_its_recomputation(monkeypatch):
    original = NodeCost.seconds_of
    longer = {Kind.FORWARD: 10.0}
    monkeypatch.setattr(NodeCost, "seconds_of", lambda self, kind: original(self, kind) + longer.get(kind, 0.0))
    costs = compute_stage_costs(BLOCKS, OF_BLOCKS, Partition((("a",), ("b", "c"))), recomputed=(1,))
    assert (costs.backward, costs.input_grad[1]) == ((2.0, 4.0 + 2.0 + 20.0), 2.0 + 2.0 + 20.0)


def test_a_block_that_is_recomputed_keeps_the_buffers_that_it_writes_as_they_were():
    head, last = BLOCKS.nodes[:2], replace(BLOCKS.nodes[2], buffers=("mean",))
    graph = replace(BLOCKS, nodes=(*head, last), buffers=(saved_value("mean", 3),), updates=(Update("c", ("mean",)),))
    profile = replace(SAVED_PROFILE, fingerprint=graph.fingerprint)
    assert compute_stage_costs(graph, profile, Partition((("a", "b", "c"),)), recomputed=(0,)).activation_bytes == (
        10 + 20 + 3,
    )


def test_functions_between_blocks_are_not_recomputed():
    partition = Partition((("a",), ("b", "c")))
    assert compute_stage_costs(SAVED_GRAPH, SAVED_PROFILE, partition, recomputed=(0, 1)) == compute_stage_costs(
        SAVED_GRAPH, SAVED_PROFILE, partition
    )


def test_a_block_that_writes_into_what_it_is_given_is_not_recomputed():
    writing = replace(BLOCKS, storage=(StorageGroup(("b", "c"), ("c",)),))
    profile = replace(SAVED_PROFILE, fingerprint=writing.fingerprint)
    assert compute_stage_costs(writing, profile, Partition((("a", "b", "c"),)), recomputed=(0,)).backward == (
        6.0 + 2.0,
    )


def test_without_measurements_a_recomputed_stage_holds_its_inputs():
    unknown = replace(OF_BLOCKS, held=())
    assert compute_stage_costs(BLOCKS, unknown, Partition((("a",), ("b", "c"))), recomputed=(1,)).activation_bytes == (
        0,
        10,
    )
