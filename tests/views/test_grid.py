"""The text grid looks like the staircase one sees in papers."""

from textwrap import dedent

import pytest

from penstock.errors import ViewError
from penstock.ir import StageCosts
from penstock.views import Grid
from tests.views.samples import PAIR, TWO_RANKS, VEE, jittered, named, run, standing_still


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def test_gpipe_is_a_staircase_up_and_a_staircase_down() -> None:
    assert Grid()(named("gpipe", 4, 4)) == picture("""
        rank 0 | F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
        rank 1 | .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
        rank 2 | .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
        rank 3 | .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .  .  .
        """)


def test_a_split_backward_shows_input_and_weight_gradients() -> None:
    assert Grid()(run("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1")) == picture("""
        rank 0 | F0 F1 .  I0 W0 I1 W1
        rank 1 | .  F0 I0 F1 I1 W0 W1
        """)


def test_the_stage_stands_first_where_a_rank_holds_several() -> None:
    assert Grid()(run(VEE)) == picture("""
        rank 0 | 0F0 0F1 .   3F0 3B0 3B0 3F1 3B1 3B1 .   0B0 0B0 .   .   0B1 0B1
        rank 1 | .   1F0 2F0 1F1 2F1 .   2B0 2B0 1B0 1B0 2B1 2B1 1B1 1B1 .   .
        """)


def test_an_overlapped_pair_takes_two_lines() -> None:
    assert Grid()(run(PAIR)) == picture("""
        rank 0 | F0 F1 F1 F1 B1 B1
               |    B0 B0 B0
        """)


def test_ranks_line_up_when_their_numbers_differ_in_length() -> None:
    lines = Grid()(named("1f1b", 11, 2)).splitlines()
    assert lines[9].startswith("rank  9 | .")
    assert lines[10].startswith("rank 10 | .")


def test_the_cell_is_the_largest_common_step_of_unequal_passes() -> None:
    halves = StageCosts((0.5, 1.0), (0.5, 0.5), (0.5, 0.5))
    assert Grid()(run("0F0,0B0\n1F0,1B0", halves)) == picture("""
        rank 0 | F0 .  .  .  .  B0 B0
        rank 1 | .  F0 F0 B0 B0 .  .
        """)


def test_a_chosen_step_shows_what_fills_most_of_a_cell_and_says_so() -> None:
    assert Grid(step=2.0)(run("0F0,0B0,0F1,0B1")) == picture("""
        rank 0 | F0 B0 B1
        a cell is 2 s and shows what fills most of it
        """)


def test_a_recorded_trace_without_a_common_step_is_drawn_in_steps_that_its_passes_fill() -> None:
    recorded, simulated = (Grid()(trace).splitlines() for trace in (jittered(run(TWO_RANKS)), run(TWO_RANKS)))
    assert [line.replace(" ", "") for line in recorded[:2]] == [line.replace(" ", "") for line in simulated]
    assert recorded[2].startswith("a cell is 1.0")


def test_a_long_trace_is_clipped_with_a_note_and_never_wrapped() -> None:
    lines = Grid(width=40)(named("1f1b", 2, 100)).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines[:2])) <= 40
    assert lines[2] == "clipped: 8 of 303 cells shown"


def test_a_short_trace_has_no_notes() -> None:
    assert len(Grid()(run(TWO_RANKS)).splitlines()) == 2


def test_lines_are_plain_ascii_without_trailing_blanks() -> None:
    text = Grid()({"größer": named("dualpipe_v", 2, 6)})
    assert text.isascii()
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_several_traces_stand_below_each_other_under_their_names() -> None:
    assert Grid()({"one": run("0F0,0B0"), "two": run("0F0,0B0")}) == picture("""
        one
        rank 0 | F0 B0 B0

        two
        rank 0 | F0 B0 B0
        """)


def test_a_pass_of_no_length_fills_no_cell() -> None:
    assert Grid()(run("0F0,0B0", StageCosts((0.0,), (1.0,), (1.0,)))) == "rank 0 | B0"


def test_a_trace_of_no_length_has_no_cells() -> None:
    assert Grid()(standing_still(run("0F0,0B0"))).splitlines()[0] == "rank 0 |"


def test_a_step_of_nothing_is_refused() -> None:
    with pytest.raises(ViewError, match="step must be above 0"):
        Grid(step=0.0)
