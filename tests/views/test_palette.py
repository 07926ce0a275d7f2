"""Colours that everyone can tell apart."""

from itertools import combinations

import pytest

from penstock.ir import Kind
from penstock.views.palette import IDLE, KIND_COLORS, channels, contrast, fill, luminance, text_on

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def lightness(color: str) -> float:
    """Perceived lightness, 0 to 100."""
    y = luminance(color)
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


@pytest.mark.parametrize(("one", "other"), list(combinations([*(KIND_COLORS[kind] for kind in PASSES), IDLE], 2)))
def test_kinds_and_idle_differ_in_greyscale(one: str, other: str) -> None:
    assert abs(lightness(one) - lightness(other)) >= 7


@pytest.mark.parametrize(("one", "other"), list(combinations(PASSES, 2)))
def test_kinds_differ_to_colour_blind_readers(one: Kind, other: Kind) -> None:
    def without_red_cones(color: str) -> tuple[float, float]:
        """The channels that a deuteranope sees: lightness, and blue against yellow."""
        red, green, blue = channels(color)
        return lightness(color), (red + green) / 5 - blue / 2.5

    a, b = without_red_cones(KIND_COLORS[one]), without_red_cones(KIND_COLORS[other])
    assert abs(a[0] - b[0]) + abs(a[1] - b[1]) >= 20


@pytest.mark.parametrize("kind", KIND_COLORS)
def test_text_is_readable_on_every_shade_and_later_stages_are_lighter(kind: Kind) -> None:
    shades = [fill(kind, chunk, 4) for chunk in range(4)]
    assert min(contrast(text_on(color), color) for color in shades) >= 4.5
    assert [luminance(color) for color in shades] == sorted({luminance(color) for color in shades})
