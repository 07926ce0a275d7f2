"""The memory curves, as SVG and as PNG."""

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.ir import Curve, Series
from penstock.views import Memory
from penstock.views.palette import ALARM
from tests.views.samples import GIB, heavy, named, run

SVG = "{http://www.w3.org/2000/svg}"


def texts(document: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(document).iter(f"{SVG}text")]


def areas(document: str) -> list[str]:
    return [area.attrib["fill"] for area in ElementTree.fromstring(document).iter(f"{SVG}polygon")]


def test_every_rank_has_a_curve_and_its_peak_in_readable_units() -> None:
    document = Memory()(heavy())
    assert len(areas(document)) == 2
    assert texts(document).count("4 GiB") == 1  # rank 0 holds two microbatches
    assert texts(document).count("3 GiB") == 1


def test_without_a_limit_nothing_is_red() -> None:
    assert ALARM not in Memory()(heavy())


def test_a_limit_is_a_dashed_line_in_every_row() -> None:
    document = Memory(limit="5GiB")(heavy())
    assert document.count("stroke-dasharray") == 2
    assert ALARM not in areas(document)
    assert any(text.endswith("dashed: limit of 5 GiB") for text in texts(document))


def test_memory_above_the_limit_is_red() -> None:
    assert areas(Memory(limit=int(3.5 * GIB))(heavy())).count(ALARM) == 1


def test_all_ranks_have_one_scale_that_is_named() -> None:
    assert "every row is 0 to 4.32 GiB" in texts(Memory()(heavy()))


def test_a_trace_without_bytes_has_a_note() -> None:
    assert "the trace has no memory curves" in texts(Memory()(run("0F0,0B0")))


def test_a_rank_without_figures_has_an_empty_row() -> None:
    trace = heavy()
    assert Memory()(replace(trace, memory=(trace.memory[0], Curve(Series(()), Series(())))))


def test_where_a_curve_changes_faster_than_pixels_its_peak_still_shows() -> None:
    trace = run("0F0,0B0")
    held = np.ones(100_000)
    held[54_321] = 1000.0
    curve = Curve(Series(np.linspace(0, 3, len(held))), Series(held))
    document = Memory()(replace(trace, memory=(curve,)))
    points = next(ElementTree.fromstring(document).iter(f"{SVG}polygon")).attrib["points"].split()
    heights = [float(point.split(",")[1]) for point in points]
    assert len(points) < 2000
    assert max(heights) - min(heights) > 40


def test_a_huge_trace_makes_a_small_document() -> None:
    assert len(Memory()(named("interleaved", 64, 256))) < 3_000_000


def test_a_limit_must_be_a_size() -> None:
    with pytest.raises(PenstockError, match="not a size in bytes"):
        Memory(limit="much")


def test_the_png_is_an_image() -> None:
    pytest.importorskip("matplotlib")
    assert Memory(limit="3GiB", format="png", scale=1.0)({"one": heavy(), "two": heavy()}).startswith(b"\x89PNG")
