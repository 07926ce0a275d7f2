"""The terminal view fits any width, with and without colours."""

import io
import re

import pytest
from rich.console import Console
from rich.style import Style

from penstock.ir import StageCosts, Trace
from penstock.views import Terminal
from penstock.views.palette import KIND_COLORS, channels
from tests.views.samples import PAIR, TWO_RANKS, VEE, jittered, named, run, standing_still


def plain(trace: Trace, width: int = 120) -> list[str]:
    return Terminal(width=width, color=False)(trace).splitlines()


def test_without_colours_a_pass_is_its_name_continued_by_dashes() -> None:
    assert plain(run(TWO_RANKS)) == [
        "makespan 9 s, bubble 33.3 %",
        "rank 0 F0-F1-......B0----...B1----",
        "rank 1 ...F0-B0----F1-B1----......",
        " F forward  B backward",
    ]


def test_the_stage_comes_first_where_a_rank_holds_several() -> None:
    assert plain(run(VEE))[1].startswith("rank 0 0F0-0F1-....3F0-3B0-----")


def test_an_overlapped_pair_takes_two_lines() -> None:
    assert plain(run(PAIR))[1:3] == ["rank 0 F0-F1-------B1----", "          B0-------"]


def test_a_narrower_terminal_has_fewer_characters_per_step() -> None:
    assert plain(run(TWO_RANKS), width=18)[1] == "rank 0 FF..B0.B1"


@pytest.mark.parametrize("width", [1, 8, 40, 80, 200])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe_v"])
def test_no_line_is_wider_than_the_terminal(schedule: str, width: int) -> None:
    assert max(map(len, plain(named(schedule, 4, 16), width))) <= width


def test_where_passes_are_shorter_than_a_character_letters_are_in_proportion_to_time() -> None:
    lines = plain(named("1f1b", 2, 400), width=107)
    assert lines[0].endswith("a letter is 12 s")
    assert lines[1].count("F") == pytest.approx(100 / 3, abs=1)
    assert lines[1].count("B") == pytest.approx(200 / 3, abs=1)


@pytest.mark.parametrize(
    ("forward", "backward", "line"),
    [
        (1, 2, "rank 0 F0-F1-B0----B1----"),
        (0.5, 0.25, "rank 0 F0----F1----B0-B1-"),
        (2, 3, "rank 0 F0----F1----B0-------B1-------"),
        (1e-6, 4e-6, "rank 0 F0-F1-B0----------B1----------"),
    ],
)
def test_passes_take_characters_in_proportion_to_their_seconds(forward: float, backward: float, line: str) -> None:
    costs = StageCosts((forward,), (backward,), (0.0,))
    assert plain(run("0F0,0F1,0B0,0B1", costs))[1] == line


@pytest.mark.parametrize(
    "trace",
    [
        run("0F0,0B0", StageCosts((1.0,), (2**0.5,), (0.0,))),
        run("0F0,0B0", StageCosts((1.0,), (1.01,), (0.0,))),
        jittered(run("0F0,0B0")),
        standing_still(run("0F0,0B0")),
    ],
    ids=["no common step", "a very short common step", "recorded", "no length"],
)
def test_a_trace_without_a_useful_common_step_fills_the_width(trace: Trace) -> None:
    line = plain(trace, 40)[1]
    assert line.startswith("rank 0 ")
    assert len(line) <= 40


def test_colours_are_those_of_the_kinds() -> None:
    Style._add.cache_clear()  # rich keeps the codes of sums of styles from the first console that showed them
    red, green, blue = channels(next(iter(KIND_COLORS.values())))
    assert f"48;2;{red};{green};{blue}" in Terminal()(run(TWO_RANKS))


def test_in_colour_a_single_character_is_the_last_digit_of_the_microbatch() -> None:
    line = Terminal(width=20)(run("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3")).splitlines()[1]
    assert re.sub(r"\x1b\[[0-9;]*m", "", line) == "rank 0 0123B0B1B2B3"


def test_a_console_without_colours_gets_none() -> None:
    console = Console(file=io.StringIO(), width=60)
    console.print(Terminal().renderable({"one": run(TWO_RANKS), "two": run(TWO_RANKS)}))
    output = console.file.getvalue()
    assert "\x1b" not in output
    assert "one: makespan 9 s" in output
    assert "two: makespan 9 s" in output
