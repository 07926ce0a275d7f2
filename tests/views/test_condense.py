"""The parts of a condensed graph: which nodes are grouped, and which stay apart so that no connection is lost."""

from penstock.ir import Graph, Value
from penstock.views import Staged
from penstock.views.condense import CondensedGraph
from tests.views.graphs import HIDDEN, IDS, block, cut, decoder, function, graph, unet

X = (Value("x", HIDDEN),)


def shown(subject: Staged, collapse: int = 4) -> list[tuple[str, str]]:
    return [(part.title, part.kind) for part in CondensedGraph.of(subject, collapse).parts]


def towers(*wanted: str) -> Graph:
    """Six equal blocks in a row, whose results of the given names are read at the end."""
    blocks = [block(f"b.{n}", f"b.{n - 1}" if n else "stem") for n in range(6)]
    return graph(block("stem", "x"), *blocks, function("/sum", *wanted), inputs=X, outputs=("/sum",))


def test_a_decoder_is_its_modules_the_functions_between_them_and_one_run_of_layers() -> None:
    assert shown(decoder(64)) == [
        ("embed", "Embedding"),
        ("/arange … le", "glue: 2 functions"),
        ("layers.0 … layers.63", "64 × Layer"),
        ("head", "Linear"),
        ("/view@2", "glue: view"),
        ("/view … loss", "glue: 2 functions"),
    ]


def test_a_cut_divides_a_run() -> None:
    titles = [title for title, _ in shown(cut(decoder(64), "layers.20", "layers.40"))]
    assert [title for title in titles if title.startswith("layers")] == [
        "layers.0 … layers.19",
        "layers.20 … layers.39",
        "layers.40 … layers.63",
    ]


def test_fewer_equal_parts_than_asked_for_stay_apart() -> None:
    assert ("layers.2", "Layer") in shown(decoder(3))
    assert ("layers.0 … layers.2", "3 × Layer") in shown(decoder(3), collapse=3)


def test_with_0_every_node_is_a_part() -> None:
    assert len(shown(decoder(64), collapse=0)) == len(decoder(64).nodes)


def test_blocks_that_feed_skips_stay_apart() -> None:
    assert [kind for _, kind in shown(unet(), collapse=2) if "×" in kind] == []


def test_a_value_that_leaves_a_run_in_the_middle_divides_it() -> None:
    assert [kind for _, kind in shown(towers("b.2", "b.5"), collapse=2) if "×" in kind] == ["2 × Block", "3 × Block"]


def test_values_that_all_go_to_one_reader_do_not_divide_a_run() -> None:
    every = towers(*(f"b.{n}" for n in range(6)))
    condensed = CondensedGraph.of(every, 4)
    assert [part.kind for part in condensed.parts if part.times > 1] == ["5 × Block"]
    assert sum(len(each.values) for each in condensed.connections if condensed.part_of["/sum"] in each.targets) == 6


def test_blocks_of_other_shapes_are_not_equal() -> None:
    narrow = block("b.2", "b.1", makes=IDS)
    blocks = [block("b.0", "x"), block("b.1", "b.0"), narrow, block("b.3", "b.2"), block("b.4", "b.3")]
    whole = graph(*blocks, inputs=X, outputs=("b.4",))
    assert [kind for _, kind in shown(whole, collapse=3) if "×" in kind] == []


def opened(layers: int) -> Graph:
    """Layers of a block and two functions each, as when modules are opened."""
    nodes = [block("stem", "x")]
    for layer in range(layers):
        name, before = f"layers.{layer}", nodes[-1].name
        nodes += [block(f"{name}.linear", before), function(f"{name}/tanh", f"{name}.linear")]
        nodes += [function(f"{name}/add", f"{name}/tanh", before)]
    return graph(*nodes, block("head", nodes[-1].name), inputs=X, outputs=("head",))


def test_repetitions_of_several_parts_are_one_part_named_after_their_module() -> None:
    assert shown(opened(6))[:2] == [("stem", "Block"), ("layers.0 … layers.4", "5 × 3 nodes")]


def test_a_run_has_the_parameters_of_all_its_repetitions() -> None:
    condensed = CondensedGraph.of(decoder(8), 4)
    (run,) = [part for part in condensed.parts if part.times == 8]
    assert condensed.parameter_size(run.nodes).num_parameters == 8 * 16
    assert condensed.parameter_size(run.first).num_parameters == 16


def test_tied_parameters_count_once() -> None:
    condensed = CondensedGraph.of(decoder(1), 4)
    assert condensed.parameter_size(condensed.graph.nodes).num_parameters == 2 * 16


def test_a_function_with_a_parameter_is_a_block() -> None:
    used = function("/expand")
    used = used.__class__(used.name, (), used.makes, ("token",), kind="expand")
    whole = graph(used, function("/a", "/expand"), function("/b", "/a"), inputs=X, outputs=("/b",))
    assert shown(whole) == [("/expand", "expand"), ("/a … b", "glue: 2 functions")]


def test_functions_of_inputs_only_precede_their_first_reader() -> None:
    whole = graph(
        function("/mask", "x", makes=IDS, free=True),
        block("a", "x"),
        block("b", "a", "/mask"),
        inputs=X,
        outputs=("b",),
    )
    assert [title for title, _ in shown(whole)] == ["a", "/mask", "b"]


def test_a_very_long_name_keeps_its_end() -> None:
    name = "a." * 100 + "last"
    (title, _), *_ = shown(graph(block(name, "x"), inputs=X, outputs=(name,)))
    assert len(title) == 80
    assert title.startswith("...")
    assert title.endswith(".last")
