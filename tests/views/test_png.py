"""The PNG of a timeline."""

import io

import numpy as np
import pytest

from penstock.errors import ViewError
from penstock.views import Png, Svg
from penstock.views.palette import channels, fill
from tests.views.samples import PAIR, TWO_RANKS, named, run

image = pytest.importorskip("matplotlib.image")


def pixels(document: bytes) -> np.ndarray:
    return np.round(255 * image.imread(io.BytesIO(document))[..., :3]).astype(int)


def share(document: bytes, color: str) -> float:
    return float((np.abs(pixels(document) - channels(color)).max(axis=2) <= 2).mean())


def test_it_is_as_wide_as_asked_times_the_scale() -> None:
    assert pixels(Png(width=600, scale=1.5)(run(TWO_RANKS))).shape[1] == 900


def test_backward_passes_cover_twice_the_area_of_forward_passes() -> None:
    document = Png(width=1000)(run("0F0,0B0"))
    assert share(document, fill(1, 0, 1)) == pytest.approx(2 * share(document, fill(0, 0, 1)), rel=0.1)


def test_it_has_the_layout_of_the_svg() -> None:
    traces = {"one": run(TWO_RANKS), "two": run(PAIR)}
    drawing = Svg(critical=True)(traces)
    height = pixels(Png(critical=True, scale=1.0)(traces)).shape[0]
    assert f'height="{height}' in drawing


def test_small_multiples_stand_side_by_side() -> None:
    traces = {name: named(name, 2, 4) for name in ("gpipe", "1f1b", "zb_h1", "zb_h2")}
    assert pixels(Png(columns=2, scale=1.0)(traces)).shape[0] < pixels(Png(scale=1.0)(traces)).shape[0]


def test_a_dollar_in_a_name_is_a_dollar() -> None:
    assert Png(scale=1.0)({r"$\frac{": run("0F0,0B0")})


def test_an_image_too_large_to_paint_is_refused() -> None:
    with pytest.raises(ViewError, match="too large"):
        Png(width=1200, scale=100.0)(run("0F0,0B0"))


def test_a_scale_of_nothing_is_refused() -> None:
    with pytest.raises(ViewError, match="scale must be above 0"):
        Png(scale=0.0)(run("0F0,0B0"))
