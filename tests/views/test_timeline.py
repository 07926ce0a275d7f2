"""The timeline: SVG read back as XML, and PNG pixels."""

import io
import re
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest

from penstock.errors import ViewError
from penstock.ir import Trace
from penstock.views import Timeline
from penstock.views.drawing import text_width
from penstock.views.palette import IDLE, MARK, channels, fill
from tests.views.samples import PAIR, TWO_RANKS, VEE, jittered, named, run

SVG = "{http://www.w3.org/2000/svg}"


def read(document: str) -> ElementTree.Element:
    return ElementTree.fromstring(document)


def boxes(document: str, color: str) -> list[dict[str, str]]:
    """The attributes of the boxes of that colour that stand for passes."""
    found = (box for box in read(document).iter(f"{SVG}rect") if box.get("fill") == color)
    return [box.attrib for box in found if box.find(f"{SVG}title") is not None]


def all_boxes(document: str, color: str) -> list[dict[str, str]]:
    return [box.attrib for box in read(document).iter(f"{SVG}rect") if box.get("fill") == color]


def texts(document: str) -> list[str]:
    return [text.text or "" for text in read(document).iter(f"{SVG}text")]


def test_every_pass_is_a_box_in_the_colour_of_its_kind() -> None:
    document = Timeline()(run(TWO_RANKS))
    assert len(boxes(document, fill(0, 0, 1))) == 4
    assert len(boxes(document, fill(1, 0, 1))) == 4


def test_the_width_of_a_box_is_its_share_of_the_makespan() -> None:
    forward, backward = (float(boxes(Timeline()(run("0F0,0B0")), fill(kind, 0, 1))[0]["width"]) for kind in (0, 1))
    assert backward == pytest.approx(2 * forward, rel=0.01)


def test_the_second_stage_of_a_rank_is_lighter() -> None:
    document = Timeline()(run(VEE))
    assert len(boxes(document, fill(0, 0, 2))) == len(boxes(document, fill(0, 1, 2))) == 4


def test_boxes_contain_stage_kind_and_microbatch() -> None:
    assert {"0F0", "3F1", "2B1"} <= set(texts(Timeline()(run(VEE))))


def test_in_narrow_boxes_only_the_microbatch_is_written() -> None:
    written = texts(Timeline(width=330)(named("gpipe", 2, 8)))
    assert "7" in written
    assert "F7" not in written


def test_where_no_text_fits_into_boxes_passes_are_marked_above_them() -> None:
    document = Timeline()(named("zbv", 16, 64))
    written = set(texts(document))
    assert {f"{stage}F0" for stage in (0, 31, 1, 30)} <= written
    assert all(any(re.fullmatch(rf"\d+{kind}\d+", text) for text in written) for kind in "FIW")
    assert len(boxes(document, fill(0, 0, 2))) == 16 * 64


def test_marks_do_not_run_into_each_other() -> None:
    for name in ("zbv", "dualpipe_v", "1f1b"):
        marked = [
            text for text in read(Timeline()(named(name, 8, 64))).iter(f"{SVG}text") if text.get("font-size") == "7"
        ]
        rows: dict[str, list[tuple[float, str]]] = {}
        for text in marked:
            rows.setdefault(text.attrib["y"], []).append((float(text.attrib["x"]), text.text or ""))
        for row in rows.values():
            for (x, text), (following, _) in pairwise(sorted(row)):
                assert x + text_width(text, 7) < following


def test_ranks_with_their_stages_time_and_a_legend_are_labelled() -> None:
    written = texts(Timeline()(run(VEE)))
    assert {"rank 0: 0,3", "rank 1: 1,2", "0 s", "forward", "backward", "idle"} <= set(written)
    assert "makespan 16 s, bubble 25.0 %; 2 ranks, 4 stages, 2 microbatches" in written


def test_the_bubble_is_the_visible_background_of_a_row() -> None:
    assert len(all_boxes(Timeline()(run(TWO_RANKS)), IDLE)) == 2 + 1  # the rows, and the legend


def test_an_overlapped_pair_is_two_boxes_one_above_the_other() -> None:
    document = Timeline()(run(PAIR))
    upper = boxes(document, fill(0, 0, 1))[1]
    lower = boxes(document, fill(1, 0, 1))[0]
    assert upper["x"] == lower["x"]
    assert float(upper["y"]) + float(upper["height"]) <= float(lower["y"])


def test_a_pointer_on_a_box_shows_its_times() -> None:
    tips = [title.text for title in read(Timeline()(run("0F0,0B0"))).iter(f"{SVG}title")]
    assert "backward of stage 0, microbatch 0, rank 0: 1 s to 3 s" in tips


def test_the_critical_path_is_marked_when_asked_for() -> None:
    marked, bare = (
        [
            line
            for line in read(Timeline(critical=flag)(run(TWO_RANKS))).iter(f"{SVG}polyline")
            if line.get("stroke") == MARK
        ]
        for flag in (True, False)
    )
    assert len(marked) == 2  # the path, and the legend
    assert not bare


def test_several_traces_share_one_scale_of_time() -> None:
    short, long = run("0F0,0B0"), run("0F0,0B0,0F1,0B1")
    widths = {box["width"] for box in boxes(Timeline()({"short": short, "long": long}), fill(0, 0, 1))}
    assert len(widths) == 1


def test_columns_put_traces_side_by_side() -> None:
    pair = {"one": run("0F0,0B0"), "two": run("0F0,0B0")}
    beside, below = read(Timeline(columns=2)(pair)), read(Timeline()(pair))
    assert float(beside.attrib["height"]) < float(below.attrib["height"])
    assert beside.attrib["width"] == below.attrib["width"]


def test_names_are_escaped() -> None:
    assert '<b> & "c"' in texts(Timeline()({'<b> & "c"': run("0F0,0B0")}))


def test_a_name_wider_than_its_panel_is_cut_off_with_dots() -> None:
    title = texts(Timeline(width=260)({"a rather long name of a trace": run("0F0,0B0")}))
    assert any(text.startswith("a rather") and text.endswith("..") for text in title)


def test_a_legend_wider_than_the_picture_takes_several_lines() -> None:
    narrow, wide = (
        float(read(Timeline(width=width)(named("dualpipe_v", 2, 6))).attrib["height"]) for width in (260, 1200)
    )
    assert narrow > wide


def test_a_document_loads_nothing_from_elsewhere() -> None:
    document = Timeline()(named("dualpipe_v", 4, 8))
    assert document.count("http") == 1  # the name of the SVG namespace
    assert "<script" not in document


@pytest.fixture(scope="module")
def huge() -> Trace:
    return named("interleaved", 64, 512)


def test_a_huge_trace_is_merged_into_a_small_document(huge: Trace) -> None:
    document = Timeline(critical=True)(huge)
    assert len(document) < 3_000_000
    assert "many passes: heights are shares of time" in texts(document)
    assert "critical path" not in texts(document)


def test_merged_boxes_cover_as_much_as_the_passes_they_stand_for() -> None:
    trace = named("1f1b", 2, 2000)
    document = Timeline()(trace)
    forward, backward = (
        sum(float(box["width"]) * float(box["height"]) for box in all_boxes(document, fill(kind, 0, 1)))
        for kind in (0, 1)
    )
    assert backward == pytest.approx(2 * forward, rel=0.03)


def test_a_recorded_trace_is_merged_too() -> None:
    assert "many passes: heights are shares of time" in texts(Timeline()(jittered(named("1f1b", 2, 2000))))


def pixels(document: bytes) -> np.ndarray:
    image = pytest.importorskip("matplotlib.image")
    return np.round(255 * image.imread(io.BytesIO(document))[..., :3]).astype(int)


def test_a_png_has_the_layout_and_the_colours_of_the_svg() -> None:
    traces = {"one": run(TWO_RANKS), "two": run(PAIR)}
    painted = pixels(Timeline(width=600, critical=True, format="png", scale=1.5)(traces))
    height = float(read(Timeline(width=600, critical=True)(traces)).attrib["height"])
    assert painted.shape[:2] == (pytest.approx(1.5 * height, abs=1), 900)
    for color in (fill(0, 0, 1), fill(1, 0, 1), IDLE):
        assert (np.abs(painted - channels(color)).max(axis=2) <= 2).mean() > 0.01


def test_a_dollar_in_the_name_of_a_png_is_no_formula() -> None:
    pytest.importorskip("matplotlib")
    assert Timeline(format="png", scale=1.0)({r"$\frac{": run("0F0,0B0")})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "png", "scale": 100.0}, "too large"),
        ({"format": "png", "scale": 0.0}, "scale must be above 0"),
        ({"format": "gif"}, "format must be svg or png"),
        ({"columns": 0}, "columns must be above 0"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(options: dict[str, object], message: str) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ViewError, match=message):
        Timeline(**options)(run("0F0,0B0"))
