"""Holding: memory that several nodes hold is there once in each stage that holds it.

The chain x -> a -> b -> c: `a` makes 10 bytes that `b` holds, `b` makes 20 that `b` and `c` hold, `c` makes 40 that
nobody holds. Each node has bytes of its own as well.
"""

from dataclasses import replace

import pytest

from penstock.ir import (
    Graph,
    Node,
    NodeCost,
    Partition,
    Placement,
    Profile,
    SavedTensors,
    StorageGroup,
    TensorSpec,
    Update,
    Value,
    compute_stage_costs,
)


def value(name, size):
    return Value(name, TensorSpec((size,), "uint8", requires_grad=True))


A, B, C = value("a", 10), value("b", 20), value("c", 40)
GRAPH = Graph((Node("a", ("x",), (A,)), Node("b", ("a",), (B,)), Node("c", ("b",), (C,))), (value("x", 1),), ("c",))
HOLDS = {
    "a": SavedTensors(own=100),
    "b": SavedTensors(own=200, values=("a", "b"), late_own=7, late_values=("a",), late_gradients=("b",)),
    "c": SavedTensors(own=400, values=("b",), late_own=9, late_values=("b",), late_gradients=("c",)),
}
COSTS = tuple(NodeCost(name, 1.0, 2.0, 1.0, 1.0, saved=holds) for name, holds in HOLDS.items())
PROFILE = Profile(COSTS, 9.0, GRAPH.fingerprint, "cpu", held=(("a", 10), ("b", 20)))


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
    assert list(compute_stage_costs(GRAPH, PROFILE, partition).activation_bytes) == kept


def test_values_and_gradients_wait_for_the_weight_gradient():
    costs = compute_stage_costs(GRAPH, PROFILE, Partition((("a",), ("b", "c"))))
    assert costs.weight_grad_bytes == (100 + 10, 7 + 9 + 10 + 20 + 20 + 40)


def test_a_view_and_what_it_is_a_view_of_are_one_piece_of_memory():
    shared = replace(GRAPH, storage=(StorageGroup(("a", "b")),))
    profile = replace(PROFILE, fingerprint=shared.fingerprint, held=(("a", 10),))
    assert compute_stage_costs(shared, profile, Partition((("a", "b", "c"),))).activation_bytes == (
        100 + 200 + 400 + 10,
    )


def test_stages_of_one_rank_share_what_one_hands_the_other():
    costs = compute_stage_costs(GRAPH, PROFILE, Partition((("a", "b"), ("c",))), placement=Placement((0, 0)))
    assert costs.activation_bytes == (100 + 200 + 10 + 20, 400)


def test_what_only_the_later_of_two_stages_of_one_rank_holds_is_its_own():
    costs = compute_stage_costs(GRAPH, PROFILE, Partition((("a",), ("b", "c"))), placement=Placement((0, 0)))
    assert costs.activation_bytes == (100, 200 + 400 + 10 + 20)


BLOCKS = replace(
    GRAPH, nodes=tuple(replace(node, module=node.name, kind="Block", is_leaf=True) for node in GRAPH.nodes)
)
OF_BLOCKS = replace(PROFILE, fingerprint=BLOCKS.fingerprint)


def test_blocks_that_are_recomputed_hold_what_they_read_and_take_another_forward():
    costs = compute_stage_costs(BLOCKS, OF_BLOCKS, Partition((("a",), ("b", "c"))), recomputed=(1,))
    assert costs.activation_bytes == (100, 10 + 20)
    assert (costs.backward, costs.input_grad[1], costs.weight_grad[1]) == ((2.0, 4.0 + 2.0), 2.0 + 2.0, 2.0)


def test_a_block_that_is_recomputed_keeps_the_buffers_that_it_writes_as_they_were():
    head, last = BLOCKS.nodes[:2], replace(BLOCKS.nodes[2], buffers=("mean",))
    graph = replace(BLOCKS, nodes=(*head, last), buffers=(value("mean", 3),), updates=(Update("c", ("mean",)),))
    profile = replace(PROFILE, fingerprint=graph.fingerprint)
    assert compute_stage_costs(graph, profile, Partition((("a", "b", "c"),)), recomputed=(0,)).activation_bytes == (
        10 + 20 + 3,
    )


def test_functions_between_blocks_are_not_recomputed():
    partition = Partition((("a",), ("b", "c")))
    assert compute_stage_costs(GRAPH, PROFILE, partition, recomputed=(0, 1)) == compute_stage_costs(
        GRAPH, PROFILE, partition
    )


def test_a_block_that_writes_into_what_it_is_given_is_not_recomputed():
    writing = replace(BLOCKS, storage=(StorageGroup(("b", "c"), ("c",)),))
    profile = replace(PROFILE, fingerprint=writing.fingerprint)
    assert compute_stage_costs(writing, profile, Partition((("a", "b", "c"),)), recomputed=(0,)).backward == (
        6.0 + 2.0,
    )


def test_where_nobody_looked_a_stage_that_is_recomputed_holds_what_it_receives():
    unknown = replace(OF_BLOCKS, held=())
    assert compute_stage_costs(BLOCKS, unknown, Partition((("a",), ("b", "c"))), recomputed=(1,)).activation_bytes == (
        0,
        10,
    )
