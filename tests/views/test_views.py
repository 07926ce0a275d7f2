"""Every view, through the table: properties of all of them, on traces and graphs that are hard to draw."""

import io
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from penstock.errors import PartitionError, ViewError
from penstock.ir import Cluster, Graph, Node, Orders, Partition, Plan, Profile, Series, Trace, Value
from penstock.views import VIEWS, RichView, Staged
from tests.views.graphs import IDS, MASK, cut, decoder, graph, hostile, unet
from tests.views.samples import PAIR, TWO_RANKS, VEE, heavy, jittered, named, run, standing_still

OF_TRACES = {name: view for name, view in VIEWS.items() if view.record is Trace}
OF_GRAPHS = {name: view for name, view in VIEWS.items() if view.record is Graph}
PICTURES = ("timeline", "memory")
TRACES = {
    "one rank, one microbatch": run("0F0,0B0"),
    "two ranks": run(TWO_RANKS),
    "two stages per rank": run(VEE),
    "overlapped pairs": run(PAIR),
    "no length": standing_still(run(VEE)),
    "recorded": jittered(run(TWO_RANKS)),
    "slow links": run(TWO_RANKS, cluster=Cluster(2, latency=0.3)),
    "bytes": heavy(),
    "split backward": named("zb_h1", 3, 5),
}
ONLY_FREE = Node("mask", ("x",), (Value("mask", MASK),), from_inputs=True)
BRANCHES = graph(
    *(Node(name, (reads,), (Value(name, IDS),)) for name, reads in (("a", "x"), ("b", "x"), ("c", "a"))),
    inputs=(Value("x", IDS),),
    outputs=("c", "b"),
)
GRAPHS: dict[str, Staged] = {
    "one node": graph(Node("a", ("x",), ()), inputs=(Value("x", IDS),), outputs=()),
    "only functions of inputs": graph(ONLY_FREE, inputs=(Value("x", IDS),), outputs=("x", "mask")),
    "no inputs": graph(Node("a", (), (Value("a", IDS),)), inputs=(), outputs=("a",)),
    "many layers": decoder(64),
    "many layers in stages": cut(decoder(64), "layers.20", "layers.40"),
    "skips": unet(),
    "skips over a stage": cut(unet(), "down.1", "up.1"),
    "a stage of functions of inputs": cut(decoder(2), "/arange", "layers.0"),
    "hostile names": hostile(),
    "stages that alternate": (BRANCHES, Partition((("a", "c"), ("b",)))),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_has_the_name_of_its_entry_and_its_file(view: str) -> None:
    assert VIEWS[view].name == view == VIEWS[view].__module__.rsplit(".", 1)[1]
    assert VIEWS[view]().suffix.startswith(".")
    assert VIEWS[view].record in (Trace, Graph, Profile, Plan)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("view", OF_TRACES)
def test_every_view_draws_every_trace_deterministically(view: str, trace: str) -> None:
    traces = {"one": TRACES[trace], "other": jittered(TRACES[trace])}
    document = VIEWS[view]()(traces)
    assert document
    assert VIEWS[view]()(traces) == document
    assert VIEWS[view]()(TRACES[trace])


@pytest.mark.parametrize("view", PICTURES)
def test_a_picture_can_be_a_png(view: str) -> None:
    pytest.importorskip("matplotlib")
    first, second = (VIEWS[view](format="png", scale=1.0)({"a": TRACES["two ranks"], "b": heavy()}) for _ in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG")


@pytest.mark.parametrize("subject", GRAPHS)
@pytest.mark.parametrize("view", OF_GRAPHS)
def test_every_view_draws_every_graph_deterministically(view: str, subject: str) -> None:
    document = OF_GRAPHS[view]()(GRAPHS[subject])
    assert document
    assert OF_GRAPHS[view]()(GRAPHS[subject]) == document


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("view", [view for view in OF_GRAPHS.values() if issubclass(view, RichView)])
def test_a_view_of_graphs_prints_on_a_console_of_any_width(view: type[RichView[Any]], width: int) -> None:
    for subject in GRAPHS.values():
        console = Console(file=io.StringIO(), width=width)
        console.print(view().renderable(subject))
        printed = console.file.getvalue()
        assert max(map(len, printed.splitlines())) <= width
        assert "\x1b" not in printed


@pytest.mark.parametrize("view", OF_TRACES)
def test_names_of_traces_cannot_contain_control_codes_or_markup(view: str) -> None:
    document = VIEWS[view]()({"<script>\x1b[31m\x00": TRACES["two ranks"], "[bold]b": TRACES["bytes"]})
    assert "\x00" not in document
    assert "\x1b[31m" not in document
    assert "<script>" not in document or VIEWS[view]().suffix != ".svg"


@pytest.mark.parametrize("view", OF_GRAPHS)
def test_names_of_nodes_cannot_contain_control_codes_or_markup(view: str) -> None:
    document = OF_GRAPHS[view]()(hostile())
    assert not set(document) & {"\x00", "\x07", "\x1b", "\u202e"}
    assert "<script>" not in document or OF_GRAPHS[view]().suffix != ".svg"


def test_a_long_name_is_shortened() -> None:
    name = VIEWS["table"]()({"x" * 500: TRACES["two ranks"]}).splitlines()[2].split()[1]
    assert len(name) == 80
    assert name.endswith("...")


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("view", OF_TRACES)
@pytest.mark.parametrize("subject", [{"schedule": "0F0"}, {}, "trace", None], ids=str)
def test_anything_but_traces_is_refused(view: str, subject: object) -> None:
    with pytest.raises(ViewError, match="a view must be given a trace"):
        VIEWS[view]()(subject)


@pytest.mark.parametrize("view", OF_GRAPHS)
@pytest.mark.parametrize("subject", ["graph", 3, (), (decoder(2),), (decoder(2), decoder(2))], ids=str)
def test_anything_but_a_graph_is_refused(view: str, subject: object) -> None:
    with pytest.raises(ViewError, match="a view must be given a graph, or a graph and its partition"):
        OF_GRAPHS[view]()(subject)


@pytest.mark.parametrize("view", OF_GRAPHS)
def test_a_partition_of_another_graph_is_refused(view: str) -> None:
    with pytest.raises(PartitionError, match="every node must be in a stage"):
        OF_GRAPHS[view]()((decoder(4), cut(decoder(3))[1]))


def test_two_names_that_print_alike_are_refused() -> None:
    with pytest.raises(ViewError, match="the same printable name"):
        VIEWS["table"]()({"a\x00": TRACES["two ranks"], "a\x01": TRACES["two ranks"]})


def test_a_trace_without_actions_is_refused() -> None:
    nothing = dict.fromkeys(("starts", "ends", "sent", "arrived"), Series(()))
    program = replace(TRACES["two ranks"].program, table=Orders([np.array([], dtype=np.int64)] * 2))
    with pytest.raises(ViewError, match="the trace has no actions"):
        VIEWS["table"]()(replace(TRACES["two ranks"], program=program, **nothing))


@pytest.mark.parametrize("view", ["terminal", *PICTURES, "report"])
@pytest.mark.parametrize("width", [0, -5])
def test_a_width_must_be_above_0(view: str, width: int) -> None:
    with pytest.raises(ViewError, match="width must be above 0"):
        VIEWS[view](width=width)


@pytest.mark.parametrize("view", ["model", "outline", "profile"])
@pytest.mark.parametrize("collapse", [1, -2])
def test_a_number_of_equal_parts_must_be_0_or_at_least_2(view: str, collapse: int) -> None:
    with pytest.raises(ViewError, match="collapse must be 0 or at least 2"):
        VIEWS[view](collapse=collapse)


@pytest.mark.parametrize("view", PICTURES)
def test_a_png_without_matplotlib_names_the_extra_to_install(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ViewError, match=r"try: pip install penstock\[plot\]"):
        VIEWS[view](format="png")(TRACES["two ranks"])


def test_a_report_is_of_contents() -> None:
    with pytest.raises(ViewError, match="a report must be given contents"):
        VIEWS["report"]()(TRACES["two ranks"])
