"""Cuts without costs: by number, by lists of modules, and before modules."""

from dataclasses import replace

import pytest

from penstock.errors import PartitionError
from penstock.ir import Graph, Node, StorageGroup, TensorSpec, Update, Value
from penstock.partitioners import by_modules, cut_before, cut_places, uniform

SPEC = TensorSpec((2, 3), requires_grad=True)


def chain(*names, storage=()):
    """Nodes that read each other in turn; those with a point in their name have parameters."""
    nodes, last = [], "x"
    for name in names:
        parameters = (f"{name}.weight",) if "." in name else ()
        nodes.append(Node(name, (last,), (Value(name, SPEC),), parameters, module=name.partition("/")[0]))
        last = name
    parameters = tuple(Value(p, SPEC) for node in nodes for p in node.parameters)
    return Graph(tuple(nodes), (Value("x", SPEC),), (last,), parameters, storage=storage)


GRAPH = chain("m.a", "m.b", "/mul", "m.c", "m.d")


def test_uniform_puts_equal_numbers_of_weighty_nodes_into_stages():
    assert uniform(GRAPH, 2).stages == (("m.a", "m.b", "/mul"), ("m.c", "m.d"))


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_uniform_makes_as_many_stages_as_asked(stages):
    partition = uniform(GRAPH, stages)
    assert partition.num_stages == stages
    partition.check(GRAPH)


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_uniform_cuts_input_only_nodes_apart_where_there_are_few_others(stages):
    masks = [f"mask.{index}" for index in range(6)]
    nodes = [Node(name, ("x",), (Value(name, SPEC),), from_inputs=True) for name in masks]
    nodes.append(Node("out", (masks[-1],), (Value("out", SPEC),)))
    partition = uniform(Graph(tuple(nodes), (Value("x", SPEC),), ("out",)), stages)
    assert partition.num_stages == stages


def test_more_stages_than_places_to_cut_are_refused():
    with pytest.raises(PartitionError, match=r"at most 5 stages in all \(places: 4, stages: 6, modules: "):
        uniform(GRAPH, 6)


def test_no_stage_is_refused():
    with pytest.raises(PartitionError, match="must be a whole number, 1 or more"):
        uniform(GRAPH, 0)


def test_memory_that_is_written_later_is_not_cut():
    graph = chain("m.a", "m.b", "/add_", "m.c", storage=(StorageGroup(("m.b", "/add_"), ("/add_",)),))
    assert uniform(graph, 3).stages == (("m.a",), ("m.b", "/add_"), ("m.c",))


def test_users_of_a_written_buffer_stay_together():
    graph = chain("m.a", "m.b", "m.c", "m.d", "m.e")
    users = [replace(node, buffers=("count",)) if node.name in ("m.b", "m.d") else node for node in graph.nodes]
    graph = replace(graph, nodes=tuple(users), buffers=(Value("count", SPEC),), updates=(Update("m.d", ("count",)),))
    assert cut_places(graph) == [1, 4]
    assert uniform(graph, 3).stages == (("m.a",), ("m.b", "m.c", "m.d"), ("m.e",))


def test_lists_of_modules_give_the_stage_of_each():
    assert by_modules(GRAPH, [["m.a"], ["m.b", "m.c", "m.d"]]).stages == (("m.a",), ("m.b", "/mul", "m.c", "m.d"))


def test_a_parent_stands_for_its_parts():
    assert by_modules(GRAPH, [["m"]]).num_stages == 1


@pytest.mark.parametrize(
    ("stages", "problem"),
    [
        ([["m.a"], ["m.b", "m.c"]], r"every module with parameters must be in a stage \(module: m.d"),
        ([["m.a", "m.bb"], ["m.c", "m.d"]], r"no such module \(name: 'm.bb'\)\ntry: did you mean 'm.b'"),
        ([["m.a", "m.b"], []], r"every stage must have a node \(stage: 1\)"),
        (
            [["m.a", "m.b"], ["m.b", "m.c", "m.d"]],
            r"a module must be in one stage only \(module: 'm.b', stages: \(0, 1\)\)",
        ),
    ],
)
def test_bad_lists_are_refused_with_the_names(stages, problem):
    with pytest.raises(PartitionError, match=problem):
        by_modules(GRAPH, stages)


def test_a_stage_that_reads_a_later_one_is_refused():
    partition = by_modules(GRAPH, [["m.b", "m.c", "m.d"], ["m.a"]])
    with pytest.raises(PartitionError, match="reads a value of a later stage"):
        partition.check(GRAPH)


def test_a_stage_begins_with_each_module_to_cut_before():
    assert cut_before(GRAPH, ["m.c"]).stages == (("m.a", "m.b", "/mul"), ("m.c", "m.d"))
    assert cut_before(GRAPH, ["m.b", "m.d"]).stages == (("m.a",), ("m.b", "/mul", "m.c"), ("m.d",))


def test_a_cut_at_the_very_beginning_is_refused():
    with pytest.raises(PartitionError, match="every stage must have a node"):
        cut_before(GRAPH, ["m.a"])
