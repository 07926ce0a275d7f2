"""The tensors that cross the cuts of a graph."""

import io
from dataclasses import replace

from rich.console import Console

from penstock.ir import Graph, TensorSpec, Value
from penstock.views import Cuts
from tests.views.graphs import block, cut, decoder, function, graph, unet


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose first header is given."""
    (part,) = [part for part in text.split("\n\n") if part.startswith(f"| {first}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()[2:]]


def test_every_tensor_that_crosses_is_listed_with_its_bytes_each_way() -> None:
    assert table(Cuts()(cut(decoder(2), "layers.1")), "stages") == [
        ["0 -> 1", "layers.0", "Layer", "float32[2, 8, 4]", "256 B", "256 B"],
    ]


def test_a_skip_goes_straight_to_its_reader_and_several_tensors_are_summed() -> None:
    assert [row[:2] + row[4:] for row in table(Cuts()(cut(unet(), "down.2", "up.1")), "stages")] == [
        ["0 -> 1", "down.1", "256 B", "256 B"],
        ["0 -> 2", "down.0", "256 B", "256 B"],
        ["1 -> 2", "/cat@2", "256 B", "256 B"],
    ]


def test_several_tensors_of_one_message_have_a_sum() -> None:
    rows = table(Cuts()(cut(unet(), "/cat")), "stages")
    assert rows[-1] == ["0 -> 1", "= 3 tensors", "", "", "768 B", "768 B"]


def without_gradient() -> Graph:
    """The first value that crosses needs no gradient."""
    ids = TensorSpec((4,), "int64")
    return graph(
        replace(block("route", "x", makes=ids), parameters=()),
        block("experts", "x", "route"),
        inputs=(Value("x", TensorSpec((4,))),),
        outputs=("experts",),
    )


def test_a_value_without_a_gradient_has_none_in_the_backward_column() -> None:
    assert table(Cuts()(cut(without_gradient(), "experts")), "stages")[0][4:] == ["32 B", "none"]


def test_the_heading_sums_messages_and_bytes() -> None:
    text = Cuts()(cut(unet(), "down.2", "up.1"))
    assert text.startswith("3 stages, 3 messages of 3 tensors per microbatch: 768 B forward, 768 B backward\n")


def test_nodes_that_several_stages_run_are_listed_with_the_bytes_that_are_not_sent() -> None:
    assert table(Cuts()(cut(decoder(4), "layers.1", "layers.3")), "run again, not sent") == [
        ["/arange … le", "glue: 2 functions", "0, 1, 2", "128 B"],
    ]


def test_a_parameter_that_several_stages_hold_is_listed() -> None:
    assert table(Cuts()(cut(decoder(4), "layers.1", "layers.3")), "held by several stages") == [
        ["embed.weight", "0, 2", "64 B"],
    ]


def test_independent_stages_send_no_messages() -> None:
    whole = graph(
        block("a", "x"),
        function("/mask", "x", free=True),
        block("b", "/mask"),
        inputs=(Value("x", TensorSpec((4,))),),
        outputs=("b",),
    )
    assert Cuts()(cut(whole, "b")).startswith("2 stages, 0 messages of 0 tensors")


def test_nothing_crosses_in_a_single_stage() -> None:
    assert Cuts()(decoder(2)) == "one stage: nothing crosses"


def test_on_a_console_all_tables_are_printed() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(Cuts().renderable(cut(decoder(4), "layers.1")))
    printed = console.file.getvalue()
    assert all(text in printed for text in ("layers.0", "256 B", "run again, not sent", "embed.weight"))
