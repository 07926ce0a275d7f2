"""The colours of a report can be seen on light and on dark paper."""

import pytest

from penstock.ir import Kind
from penstock.views.page.ribbon import hues
from penstock.views.page.theme import AREA, DARK_PAPER, dark, rules, word
from penstock.views.palette import FAINT, INK, KINDS, PAPER, STAGES, contrast


@pytest.mark.parametrize("color", [*KINDS.values(), *STAGES])
def test_what_is_drawn_stands_out_from_dark_paper(color: str) -> None:
    assert contrast(dark(color), DARK_PAPER) >= 3


@pytest.mark.parametrize("color", [INK, FAINT])
def test_text_is_read_on_both_papers(color: str) -> None:
    assert contrast(color, PAPER) >= 4.5
    assert contrast(dark(color), DARK_PAPER) >= 4.5


def test_the_numbers_of_stages_are_read_on_their_hues() -> None:
    assert min(min(contrast(light, ink), contrast(dim, dim_ink)) for light, ink, dim, dim_ink in hues()) >= 4.5


def test_the_area_below_a_curve_is_nearer_to_the_paper_than_the_curve() -> None:
    line = KINDS[Kind.FORWARD]
    assert contrast(AREA, PAPER) < contrast(line, PAPER)
    assert contrast(dark(AREA), DARK_PAPER) < contrast(dark(line), DARK_PAPER)


def test_every_colour_has_a_class_once() -> None:
    assert rules(["#1f5fa8", INK, INK]) == ".c1f5fa8{--c:#1f5fa8}.c1b1f24{--c:#1b1f24}"
    assert rules([INK], is_dark=True) == f".{word(INK)}{{--c:{dark(INK)}}}"
