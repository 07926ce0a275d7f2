"""Figures as short text."""

import pytest

from penstock.ir import bytes_text, count_text, counted, percent_text, printable, round_step, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (33, "33 s"), (1725, "1725 s"), (0.0125, "12.5 ms"), (3.21e-5, "32.1 us"), (5e-9, "5 ns"),
        (1e-12, "0.001 ns"), (-0.5, "-500 ms"), (123456, "123456 s"), (1e12, "1.000e+12 s"), (0.1234567, "123.5 ms"),
    ],
)  # fmt: skip
def test_seconds_are_in_the_largest_unit_of_which_there_is_one(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (2**20, "1 MiB"), (5.5 * 2**30, "5.5 GiB"), (2**41, "2 TiB")]
)
def test_bytes_are_in_powers_of_1024(size: float, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(("share", "text"), [(0.273, "27.3 %"), (-1e-17, "0.0 %"), (1, "100.0 %")])
def test_shares_are_in_percent(share: float, text: str) -> None:
    assert percent_text(share) == text


@pytest.mark.parametrize(("largest", "count", "step"), [(33, 10, 5), (1, 10, 0.1), (0, 5, 1), (700, 7, 100)])
def test_the_steps_of_an_axis_are_round(largest: float, count: int, step: float) -> None:
    assert round_step(largest, count) == pytest.approx(step)


def test_parameters_are_counted_in_thousands_millions_and_billions() -> None:
    counts = (0, 999, 1000, 12_345_678, 8_030_261_248)
    assert [count_text(count) for count in counts] == ["0", "999", "1 K", "12.3 M", "8.03 B"]


def test_control_characters_are_shown_as_question_marks_and_lines_stay() -> None:
    assert printable("a\x1b]0;b\x07\nc\td\u202e") == "a?]0;b?\nc\td?"


def test_one_is_singular() -> None:
    assert [counted(count, "node") for count in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
