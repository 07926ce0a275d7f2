"""Every view of graphs, through the table: what holds for all of them, on graphs that are hard to draw."""

import io
from typing import Any

import pytest
from rich.console import Console

from penstock.errors import PartitionError, ViewError
from penstock.ir import Graph, Node, Partition, Plan, Profile, Trace, Value
from penstock.views import VIEWS, RichView, Staged
from tests.views.graphs import IDS, MASK, cut, decoder, graph, hostile, unet

OF_GRAPHS = {name: view for name, view in VIEWS.items() if view.noun is Graph}
ONLY_FREE = Node("mask", ("x",), (Value("mask", MASK),), from_inputs=True)
BRANCHES = graph(
    *(Node(name, (reads,), (Value(name, IDS),)) for name, reads in (("a", "x"), ("b", "x"), ("c", "a"))),
    inputs=(Value("x", IDS),),
    outputs=("c", "b"),
)
SUBJECTS: dict[str, Staged] = {
    "one node": graph(Node("a", ("x",), ()), inputs=(Value("x", IDS),), outputs=()),
    "only glue from inputs": graph(ONLY_FREE, inputs=(Value("x", IDS),), outputs=("x", "mask")),
    "no inputs": graph(Node("a", (), (Value("a", IDS),)), inputs=(), outputs=("a",)),
    "many layers": decoder(64),
    "many layers in stages": cut(decoder(64), "layers.20", "layers.40"),
    "skips": unet(),
    "skips over a stage": cut(unet(), "down.1", "up.1"),
    "a stage of glue from inputs": cut(decoder(2), "/arange", "layers.0"),
    "hostile names": hostile(),
    "stages that alternate": (BRANCHES, Partition((("a", "c"), ("b",)))),
}


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("view", OF_GRAPHS)
def test_every_view_draws_every_graph_and_the_same_each_time(view: str, subject: str) -> None:
    document = OF_GRAPHS[view]()(SUBJECTS[subject])
    assert document
    assert OF_GRAPHS[view]()(SUBJECTS[subject]) == document


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("view", [view for view in OF_GRAPHS.values() if issubclass(view, RichView)])
def test_a_view_prints_on_a_console_of_any_width(view: type[RichView[Any]], width: int, subject: str) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(view().renderable(SUBJECTS[subject]))
    assert max(map(len, console.file.getvalue().splitlines())) <= width


def test_every_view_draws_traces_graphs_or_profiles() -> None:
    assert {view.noun for view in VIEWS.values()} == {Trace, Graph, Profile, Plan}


@pytest.mark.parametrize("view", OF_GRAPHS)
def test_names_are_data_and_cannot_smuggle_control_codes_or_markup(view: str) -> None:
    document = OF_GRAPHS[view]()(hostile())
    assert not set(document) & {"\x00", "\x07", "\x1b", "\u202e"}
    assert "<script>" not in document or OF_GRAPHS[view].suffix != ".svg"


@pytest.mark.parametrize("view", [view for view in OF_GRAPHS.values() if issubclass(view, RichView)])
def test_names_are_no_markup_of_the_console(view: type[RichView[Any]]) -> None:
    whole = hostile()
    console = Console(file=io.StringIO(), width=200)
    console.print(view().renderable((whole, Partition(((whole.nodes[0].name,),)))))
    assert "\x1b" not in console.file.getvalue()


@pytest.mark.parametrize("view", OF_GRAPHS)
@pytest.mark.parametrize("subject", ["graph", 3, (), (decoder(2),), (decoder(2), decoder(2))], ids=str)
def test_what_is_no_graph_is_refused(view: str, subject: object) -> None:
    with pytest.raises(ViewError, match="a view needs a graph, or a graph and its partition"):
        OF_GRAPHS[view]()(subject)


@pytest.mark.parametrize("view", OF_GRAPHS)
def test_a_partition_of_another_graph_is_refused(view: str) -> None:
    with pytest.raises(PartitionError, match="nodes in no stage"):
        OF_GRAPHS[view]()((decoder(4), cut(decoder(3))[1]))


@pytest.mark.parametrize("view", ["model", "outline"])
@pytest.mark.parametrize("alike", [1, -2])
def test_a_number_of_like_parts_that_cannot_be_is_refused(view: str, alike: int) -> None:
    with pytest.raises(ViewError, match="like parts are two or more"):
        OF_GRAPHS[view](alike=alike)
