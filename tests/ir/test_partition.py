"""Partition: what crosses each cut, what is run again, and cuts that cannot be made."""

from dataclasses import replace

import pytest

from penstock.errors import PartitionError
from penstock.ir import Crossing, Cuts, Graph, Node, Partition, StorageGroup, TensorSpec, Update, Value


def value(name, size=1, requires_grad=True):
    return Value(name, TensorSpec((size,), "uint8" if not requires_grad else "float32", requires_grad))


def node(name, *reads, **options):
    """A node that makes one value of its own name."""
    return Node(name, reads, (value(name, options.pop("size", 1), options.pop("requires_grad", True)),), **options)


def mask(name, *reads):
    return node(name, *reads, requires_grad=False, from_inputs=True)


def graph(*nodes, outputs=None, storage=()):
    return Graph(nodes, (value("x", requires_grad=False),), outputs or (nodes[-1].name,), storage=storage)


CHAIN = graph(node("a", "x", size=3), node("b", "a", size=5), node("c", "b"))
ONE_EACH = Partition((("a",), ("b",), ("c",)))


def test_a_partition_knows_the_stage_of_every_node():
    partition = Partition((("a", "b"), ("c",)))
    assert partition.num_stages == 2
    assert [partition.stage_of(name) for name in "abc"] == [0, 0, 1]


def test_a_chain_is_cut_into_a_chain():
    assert ONE_EACH.cuts(CHAIN) == Cuts.chain(3)
    assert ONE_EACH.crossings(CHAIN) == (Crossing(0, 1, (value("a", 3),)), Crossing(1, 2, (value("b", 5),)))


def test_crossing_bytes_go_there_and_for_gradients_back():
    crossing = Crossing(0, 1, (value("a", 3), value("index", 5, requires_grad=False)))
    assert (crossing.forward_bytes, crossing.backward_bytes) == (12 + 5, 12)


def test_a_skip_goes_straight_from_its_maker_to_its_reader():
    skip = graph(node("a", "x"), node("b", "a"), node("c", "b", "a"))
    assert ONE_EACH.cuts(skip) == Cuts.of(3, [(0, 1), (0, 2), (1, 2)])


def test_branches_need_not_touch():
    towers = graph(node("a", "x"), node("b", "x"), node("c", "a", "b"))
    assert ONE_EACH.cuts(towers) == Cuts.of(3, [(0, 2), (1, 2)])


def test_a_value_that_several_nodes_of_a_stage_read_crosses_once():
    fork = graph(node("a", "x"), node("b", "a"), node("c", "a", "b"))
    assert Partition((("a",), ("b", "c"))).crossings(fork) == (Crossing(0, 1, (value("a"),)),)


def test_an_edge_whose_values_need_no_gradient_returns_none():
    silent = graph(node("a", "x"), node("index", "a", requires_grad=False), node("c", "a"), node("d", "c", "index"))
    partition = Partition((("a", "index"), ("c",), ("d",)))
    assert partition.cuts(silent) == Cuts.of(3, [(0, 1), (0, 2), (1, 2)], without_gradient=[(0, 2)])


def test_inputs_are_everywhere_and_never_cross():
    assert Partition((("a",), ("b",))).cuts(graph(node("a", "x"), node("b", "a", "x"))) == Cuts.chain(2)


def test_nodes_that_depend_on_inputs_only_are_rerun_and_not_sent():
    masked = graph(mask("m", "x"), mask("n", "m"), node("a", "x", "n"), node("b", "a", "n"), node("c", "b"))
    partition = Partition((("m", "n", "a"), ("b",), ("c",)))
    assert partition.cuts(masked) == Cuts.chain(3)
    assert [[n.name for n in nodes] for nodes in partition.runs(masked)] == [["m", "n", "a"], ["m", "n", "b"], ["c"]]


def test_a_mask_may_belong_to_a_later_stage_than_its_reader():
    masked = graph(mask("m", "x"), node("a", "m"), node("b", "a", "m"))
    partition = Partition((("a",), ("m", "b")))
    assert partition.cuts(masked) == Cuts.chain(2)
    assert [n.name for n in partition.runs(masked)[0]] == ["m", "a"]


def test_the_last_stage_returns_the_outputs_of_earlier_ones():
    hidden = graph(mask("m", "x"), node("a", "x"), node("b", "a"), node("c", "b"), outputs=("c", "a", "m", "x"))
    partition = Partition((("m", "a"), ("b",), ("c",)))
    assert partition.cuts(hidden) == Cuts.of(3, [(0, 1), (0, 2), (1, 2)])
    assert [n.name for n in partition.runs(hidden)[2]] == ["m", "c"]


# ----------------------------------------------------------------------------------------------- what cannot be cut so


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ((), "a partition must have stages"),
        ((("a",), ()), r"every stage must have a node \(stage: 1, stages: 2\)"),
        ((("a", "b"), ("a",)), r"a node must be in one stage only \(node: 'a', times: 2\)"),
        ((("a", "a"),), r"a node must be in one stage only \(node: 'a', times: 2\)"),
    ],
)
def test_stages_are_not_empty_and_do_not_share_nodes(stages, problem):
    with pytest.raises(PartitionError, match=problem):
        Partition(stages)


def test_a_node_in_no_stage_is_named():
    with pytest.raises(PartitionError, match=r"every node must be in a stage \(nodes: 1, first: 'b'\)"):
        Partition((("a",), ("c",))).check(CHAIN)


def test_an_unknown_node_is_named_with_the_nearest_one():
    layers = graph(node("layers.0", "x"), node("layers.1", "layers.0"))
    with pytest.raises(
        PartitionError, match=r"no such node \(node: 'layer.1', stage: 1\)\ntry: did you mean 'layers.1'"
    ):
        Partition((("layers.0",), ("layer.1",))).check(layers)
    with pytest.raises(PartitionError, match="no stage owns this node"):
        ONE_EACH.stage_of("zebra")


def test_values_go_to_later_stages_only():
    with pytest.raises(
        PartitionError, match=r"a later stage \(value: 'b', made by: 'b' in stage 1, read by: 'c' in stage 0\)"
    ):
        Partition((("a", "c"), ("b",))).cuts(CHAIN)


def in_place(**options):
    """`write` writes into what `a` made; `b` reads the result."""
    nodes = (node("a", "x"), node("write", "a"), node("b", "write"))
    return graph(*nodes, storage=(StorageGroup(("a", "write"), ("write",)),), **options)


def test_memory_that_is_written_is_not_cut():
    with pytest.raises(
        PartitionError,
        match=r"share memory must be in one stage \(stages: {'a': 0, 'write': 1}, values: \('a', 'write'\)\)",
    ):
        Partition((("a",), ("write", "b"))).cuts(in_place())


def test_the_last_state_of_written_memory_may_cross():
    assert Partition((("a", "write"), ("b",))).cuts(in_place()) == Cuts.chain(2)


def test_a_value_may_not_cross_when_it_is_overwritten_before_it_is_sent():
    nodes = (node("a", "x"), node("write", "a"), node("b", "a"))
    early = graph(*nodes, outputs=("b", "write"), storage=(StorageGroup(("a", "write"), ("write",)),))
    with pytest.raises(
        PartitionError, match=r"overwritten in place crosses a cut \(value: 'a', overwritten by: 'write'"
    ):
        Partition((("a", "write"), ("b",))).cuts(early)


def test_an_output_may_not_be_overwritten_either():
    with pytest.raises(PartitionError, match="overwritten in place crosses a cut"):
        Partition((("a", "write"), ("b",))).cuts(in_place(outputs=("b", "a")))


def test_memory_that_is_shared_but_never_written_may_be_cut():
    views = replace(in_place(), storage=(StorageGroup(("a", "write")),))
    assert Partition((("a",), ("write", "b"))).cuts(views) == Cuts.chain(2)


def test_a_mask_that_is_written_is_run_again_as_a_whole():
    nodes = (mask("m", "x"), mask("fill", "m"), node("a", "fill"), node("b", "a", "fill"))
    masked = graph(*nodes, storage=(StorageGroup(("m", "fill"), ("fill",)),))
    partition = Partition((("m", "a"), ("fill", "b")))
    assert partition.cuts(masked) == Cuts.chain(2)
    assert [n.name for n in partition.runs(masked)[1]] == ["m", "fill", "b"]


def counting(*users, written_by):
    """A chain of three of which some use a buffer and some write it."""
    buffers = {name: ("count",) if name in users else () for name in "abc"}
    nodes = [node(name, reads, buffers=buffers[name]) for name, reads in zip("abc", "xab", strict=True)]
    updates = tuple(Update(name, ("count",)) for name in written_by)
    return Graph(tuple(nodes), (value("x"),), ("c",), buffers=(value("count"),), updates=updates)


def test_a_buffer_that_one_stage_alone_uses_may_be_written():
    ONE_EACH.check(counting("b", written_by="b"))


def test_a_buffer_that_nobody_writes_may_be_used_everywhere():
    ONE_EACH.check(counting("a", "b", "c", written_by=""))


@pytest.mark.parametrize(("users", "writers"), [("ab", "b"), ("ab", "ab"), ("ac", "a")])
def test_a_buffer_that_is_written_and_used_in_two_stages_is_refused(users, writers):
    with pytest.raises(PartitionError) as refused:
        ONE_EACH.check(counting(*users, written_by=writers))
    assert refused.value.problem == "a parameter or buffer that the forward writes is used in several stages"
    stages = {name: f"{name!r} in stage {stage}" for stage, name in enumerate("abc")}
    assert refused.value.values == {
        "name": "'count'",
        "written_by": ", ".join(stages[name] for name in writers),
        "used_by": ", ".join(stages[name] for name in users),
    }
