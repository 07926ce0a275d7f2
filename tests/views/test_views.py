"""Every view of traces, through the table: what holds for all of them, on traces that are hard to draw."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from penstock.errors import ViewError
from penstock.ir import Cluster, Orders, Series, Trace
from penstock.views import VIEWS, find
from tests.views.samples import PAIR, TWO_RANKS, VEE, heavy, jittered, named, run, standing_still

OF_TRACES = {name: view for name, view in VIEWS.items() if view.noun is Trace}
FIELDS = ("starts", "ends", "sent", "arrived")
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


def drawn(view: str, trace: Trace) -> str | bytes:
    document = VIEWS[view]()({"one": trace, "other": jittered(trace)})
    assert isinstance(document, str | bytes)
    return document


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("view", OF_TRACES)
def test_every_view_draws_every_trace_and_the_same_each_time(view: str, trace: str) -> None:
    document = drawn(view, TRACES[trace])
    assert document
    assert drawn(view, TRACES[trace]) == document


@pytest.mark.parametrize("view", [view for view in OF_TRACES if view != "compare"])
def test_every_view_but_a_comparison_takes_a_single_trace(view: str) -> None:
    assert VIEWS[view]()(TRACES["two ranks"])


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_called_what_its_file_and_its_place_in_the_table_are_called(view: str) -> None:
    assert VIEWS[view].name == view == VIEWS[view].__module__.rsplit(".", 1)[1]
    assert VIEWS[view].suffix.startswith(".")


@pytest.mark.parametrize("view", [view for view in OF_TRACES if VIEWS[view].suffix != ".png"])
def test_names_are_data_and_cannot_smuggle_control_codes_or_markup(view: str) -> None:
    document = VIEWS[view]()({"<script>\x1b[31m\x00": TRACES["two ranks"], "[bold]b": TRACES["bytes"]})
    assert "\x00" not in document
    assert "\x1b[31m" not in document
    assert "<script>" not in document or VIEWS[view].suffix != ".svg"


@pytest.mark.parametrize("view", OF_TRACES)
def test_what_is_no_trace_is_refused(view: str) -> None:
    with pytest.raises(ViewError, match="a view needs a trace"):
        VIEWS[view]()({"schedule": "0F0"})


def test_a_long_name_is_shortened() -> None:
    first = VIEWS["grid"]()({"x" * 500: TRACES["two ranks"]}).splitlines()[0]
    assert len(first) == 80
    assert first.endswith("...")


def test_two_names_that_print_alike_are_refused() -> None:
    with pytest.raises(ViewError, match="the same name once it is printed"):
        VIEWS["grid"]()({"a\x00": TRACES["two ranks"], "a\x01": TRACES["two ranks"]})


def test_a_trace_without_actions_is_refused() -> None:
    nothing = Series(())
    program = replace(TRACES["two ranks"].program, table=Orders([np.array([], dtype=np.int64)] * 2))
    with pytest.raises(ViewError, match="a trace without actions"):
        VIEWS["grid"]()(replace(TRACES["two ranks"], program=program, **dict.fromkeys(FIELDS, nothing)))


@pytest.mark.parametrize("options", [{"width": 0}, {"width": -5}])
@pytest.mark.parametrize("view", ["grid", "terminal", "svg", "png", "memory"])
def test_a_width_of_nothing_is_refused(view: str, options: dict[str, int]) -> None:
    with pytest.raises(ViewError, match="width must be above 0"):
        VIEWS[view](**options)


def test_a_view_is_found_whatever_the_case_and_the_dashes() -> None:
    assert find("Memory-PNG") is VIEWS["memory_png"]


def test_an_unknown_view_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ViewError, match=r"unknown view.*\n.*grid, terminal, svg"):
        find("hologram")


@pytest.mark.parametrize("view", ["png", "memory_png"])
def test_without_matplotlib_a_png_says_what_to_install(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ViewError, match=r"try: pip install penstock\[plot\]"):
        VIEWS[view]()(TRACES["two ranks"])
