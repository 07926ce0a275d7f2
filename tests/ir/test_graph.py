"""Graph: what it looks up, what it refuses, and which values need a gradient."""

from dataclasses import replace

import pytest

from penstock.errors import GraphError
from penstock.ir import ADDED_LOSS, Edge, Graph, Node, StorageGroup, TensorSpec, Update, Value, prune_gradients
from penstock.loss.add_loss import added_loss


def value(name, *shape, dtype="float32", requires_grad=True):
    return Value(name, TensorSpec(shape or (2, 4), dtype, requires_grad))


def tiny_model(batch=2):
    """ids -> embed -> block -> head, with a mask from the inputs and a head tied to the embedding."""
    return Graph(
        nodes=(
            Node("mask", ("ids",), (value("mask", batch, dtype="bool", requires_grad=False),), from_inputs=True),
            Node("embed", ("ids",), (value("embed", batch, 8),), parameters=("embed.weight",)),
            Node("block", ("embed", "mask", "embed"), (value("block", batch, 8),), ("block.weight",), ("block.count",)),
            Node("head", ("block",), (value("logits", batch, 100),), ("head.weight",), kind="Linear"),
        ),
        inputs=(value("ids", batch, dtype="int64", requires_grad=False),),
        outputs=("logits",),
        parameters=(value("embed.weight", 100, 8), value("block.weight", 8, 8), value("head.weight", 100, 8)),
        buffers=(value("block.count", dtype="int64", requires_grad=False),),
        tied=(("embed.weight", "head.weight"),),
    )


GRAPH = tiny_model()


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (TensorSpec((2, 3), "float32"), 24),
        (TensorSpec((), "bfloat16"), 2),
        (TensorSpec((0, 7), "int64"), 0),
        (TensorSpec((5,), "bool"), 5),
        (TensorSpec((5,), "complex128"), 80),
    ],
)
def test_a_tensor_has_bytes(spec, size):
    assert spec.bytes == size


def test_a_spec_prints_like_a_type():
    assert str(TensorSpec((2, 3), "bfloat16")) == "bfloat16[2, 3]"


@pytest.mark.parametrize(("shape", "dtype"), [((2,), "torch.float32"), ((2,), "float"), ((-1,), "float32")])
def test_a_spec_that_no_tensor_has_is_refused(shape, dtype):
    with pytest.raises(GraphError):
        TensorSpec(shape, dtype)


def test_edges_lead_from_node_to_node_once_per_value():
    assert GRAPH.edges == (
        Edge("embed", "block", "embed"),
        Edge("mask", "block", "mask"),
        Edge("block", "head", "block"),
    )


def test_nodes_and_specs_are_found_by_name():
    assert GRAPH["head"].kind == "Linear"
    assert GRAPH.spec("logits").shape == (2, 100)
    assert GRAPH.spec("ids").dtype == "int64"
    assert GRAPH.makers["logits"] is GRAPH["head"]


def test_an_unknown_name_is_named():
    with pytest.raises(GraphError, match=r"no such node \(name: 'nose'\)"):
        GRAPH["nose"]
    with pytest.raises(GraphError, match=r"no such value \(name: 'nose'\)"):
        GRAPH.spec("nose")


def test_tied_names_stand_for_one_tensor():
    assert GRAPH.tensor_of("head.weight") == "embed.weight"
    assert GRAPH.tensor_of("block.weight") == "block.weight"


def test_users_of_written_state_are_found_under_any_name_of_a_tied_parameter():
    graph = replace(GRAPH, updates=(Update("head", ("head.weight",)), Update("block", ("block.count",))))
    assert graph.updated == {"block.count": (GRAPH["block"],), "embed.weight": (GRAPH["embed"], GRAPH["head"])}


def test_the_fingerprint_is_that_of_the_content():
    assert GRAPH.fingerprint == tiny_model().fingerprint
    assert len(GRAPH.fingerprint) == 64


def test_another_batch_has_another_fingerprint_but_is_the_same_model():
    other = tiny_model(batch=3)
    assert other.fingerprint != GRAPH.fingerprint
    assert other.model_fingerprint == GRAPH.model_fingerprint


@pytest.mark.parametrize(
    "changed",
    [
        {"parameters": (value("embed.weight", 100, 8), value("block.weight", 8, 9), value("head.weight", 100, 8))},
        {"buffers": (value("block.count", dtype="int32", requires_grad=False),)},
        {"tied": ()},
        {"nodes": (*GRAPH.nodes[:3], replace(GRAPH.nodes[3], name="tail"))},
    ],
)
def test_another_model_has_another_model_fingerprint(changed):
    assert replace(GRAPH, **changed).model_fingerprint != GRAPH.model_fingerprint


def test_a_frozen_parameter_changes_what_was_measured_but_not_the_model():
    frozen = replace(
        GRAPH, parameters=tuple(replace(p, spec=replace(p.spec, requires_grad=False)) for p in GRAPH.parameters)
    )
    assert frozen.fingerprint != GRAPH.fingerprint
    assert frozen.model_fingerprint == GRAPH.model_fingerprint


def test_names_of_any_characters_have_a_fingerprint():
    odd = Node("\ud800 ümlaut \n", ("ids",), (value("x"),))
    assert Graph((odd,), GRAPH.inputs, ("x",)).fingerprint


def test_equal_graphs_are_equal_and_hash_alike():
    assert tiny_model() == GRAPH
    assert hash(tiny_model()) == hash(GRAPH)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"nodes": ()}, "a graph must have nodes"),
        ({"nodes": GRAPH.nodes[::-1]}, r"no earlier node makes \(name: 'block', node: head\)"),
        ({"nodes": (*GRAPH.nodes, GRAPH.nodes[0])}, "duplicate node"),
        ({"updates": (Update("nose", ()),)}, "no such node"),
        ({"updates": (Update("head", ("block.count",)),)}, "writes a parameter or buffer that it does not use"),
        ({"nodes": (*GRAPH.nodes, Node("", (), ()))}, "a node must have a name"),
        ({"nodes": (*GRAPH.nodes, Node("again", (), (value("block"),)))}, "duplicate value"),
        ({"inputs": (value("ids"), value("mask"))}, "duplicate value"),
        ({"outputs": ("nothing",)}, r"no node makes this output \(name: 'nothing'\)"),
        ({"parameters": GRAPH.parameters[1:]}, r"does not list \(name: 'embed.weight', node: embed\)"),
        ({"buffers": (value("embed.weight"),)}, "duplicate parameter or buffer"),
        ({"tied": (("head.weight", "tail.weight"),)}, "a tied parameter that the graph does not list"),
        ({"tied": (("head.weight", "block.weight"),)}, "tied parameters differ in shape"),
        ({"tied": (("head.weight",), ("head.weight",))}, "duplicate tied parameter"),
        ({"storage": (StorageGroup(("nothing",)),)}, "a storage group names a value that the graph does not have"),
        (
            {"storage": (StorageGroup(("block",), ("nobody",)),)},
            "a storage group names a writer that the graph does not have",
        ),
        (
            {"storage": (StorageGroup(("block",)), StorageGroup(("block",)))},
            "duplicate value in a storage group",
        ),
    ],
)
def test_a_graph_that_contradicts_itself_is_refused(changed, problem):
    with pytest.raises(GraphError, match=problem):
        replace(GRAPH, **changed)


def test_a_node_from_inputs_reads_nothing_else():
    with pytest.raises(
        GraphError, match=r"marked from_inputs must read values from inputs only \(name: 'embed', node: block\)"
    ):
        replace(GRAPH, nodes=(*GRAPH.nodes[:2], replace(GRAPH["block"], from_inputs=True), GRAPH["head"]))


NEEDS, IS_FREE = TensorSpec((2, 3), requires_grad=True), TensorSpec((2, 3))


def node(name: str, *reads: str, spec: TensorSpec = NEEDS) -> Node:
    return Node(name, reads, (Value(name, spec),))


#   x -> stem -> trunk -> loss
#          |---> side -> view      (mask is read by trunk, and needs no gradient)
BRANCHED = Graph(
    (
        node("stem", "x"), node("mask", "x", spec=IS_FREE), node("trunk", "stem", "mask"), node("side", "stem"),
        node("view", "side"), node("loss", "trunk"),
    ),
    (Value("x", IS_FREE),),
    ("loss", "view"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("roots", "adding", "expected"),
    [
        (("loss",), (), {"stem", "trunk", "loss"}),
        (("loss", "view"), (), {"stem", "trunk", "loss", "side", "view"}),
        (("loss",), ("view",), {"stem", "trunk", "loss", "side"}),
        ((), ("side",), {"stem"}),
        ((), (), set()),
    ],
)
def test_gradients_return_on_the_ways_to_a_root_or_to_what_adds_to_the_loss(roots, adding, expected) -> None:
    found = prune_gradients(BRANCHED, roots, adding)
    assert {value.name for one in found.nodes for value in one.makes if value.spec.requires_grad} == expected


def test_the_function_that_adds_goes_by_its_name() -> None:
    assert added_loss.__name__ == ADDED_LOSS
