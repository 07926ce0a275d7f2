"""Colours that everyone can tell apart."""

from itertools import combinations

import pytest

from penstock.ir import Kind
from penstock.views.palette import IDLE, KINDS, channels, contrast, fill, luminance, mix, text_on

PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)


def lightness(color: str) -> float:
    """Perceived lightness, 0 to 100."""
    y = luminance(color)
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def seen_without_red_cones(color: str) -> tuple[float, float]:
    """What is left to a deuteranope: brightness, and blue against yellow."""
    red, green, blue = channels(color)
    return lightness(color), (red + green) / 5 - blue / 2.5


@pytest.mark.parametrize(("one", "other"), list(combinations([*(KINDS[kind] for kind in PASSES), IDLE], 2)))
def test_kinds_and_idle_differ_in_greyscale(one: str, other: str) -> None:
    assert abs(lightness(one) - lightness(other)) >= 7


@pytest.mark.parametrize(("one", "other"), list(combinations(PASSES, 2)))
def test_kinds_differ_to_colour_blind_readers(one: Kind, other: Kind) -> None:
    a, b = seen_without_red_cones(KINDS[one]), seen_without_red_cones(KINDS[other])
    assert abs(a[0] - b[0]) + abs(a[1] - b[1]) >= 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", range(4))
def test_text_is_readable_on_every_colour(kind: Kind, chunk: int) -> None:
    color = fill(kind, chunk, 4)
    assert contrast(text_on(color), color) >= 4.5


def test_every_stage_of_a_rank_is_lighter_than_the_one_before() -> None:
    shades = [luminance(fill(Kind.FORWARD, chunk, 4)) for chunk in range(4)]
    assert shades == sorted(set(shades))


def test_half_black_and_half_white_is_grey() -> None:
    assert mix("#000000", "#ffffff", 0.5) == "#808080"
