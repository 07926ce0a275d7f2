"""The comparison of two traces."""

import io
from xml.etree import ElementTree

import pytest
from rich.console import Console

from penstock.errors import ViewError
from penstock.ir import Cluster
from penstock.views import Compare
from tests.views.samples import TWO_RANKS, heavy, named, run

PREDICTED = run(TWO_RANKS)
RECORDED = run(TWO_RANKS, cluster=Cluster(2, latency=0.5))
BOTH = {"predicted": PREDICTED, "recorded": RECORDED}


def row(document: str, name: str) -> list[str]:
    line = next(line for line in document.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_figure_stands_with_its_difference_and_the_percent_of_the_first() -> None:
    assert row(Compare()(BOTH), "makespan") == ["9 s", "10 s", "+1 s", "+11.1 %"]


def test_shares_differ_in_points() -> None:
    assert row(Compare()(BOTH), "bubble") == ["33.3 %", "40.0 %", "+6.7 points", ""]


def test_what_is_equal_differs_by_0() -> None:
    assert row(Compare()({"one": PREDICTED, "same": PREDICTED}), "makespan") == ["9 s", "9 s", "0", ""]


def test_rounding_is_no_difference() -> None:
    assert row(Compare()(BOTH), "rank 0: work") == ["6 s", "6 s", "0", ""]


def test_every_rank_has_its_work_its_idle_time_by_cause_and_its_peak() -> None:
    document = Compare()(BOTH)
    assert row(document, "rank 1: warm-up") == ["1 s", "1.5 s", "+500 ms", "+50.0 %"]
    assert row(Compare()({"light": PREDICTED, "heavy": heavy()}), "rank 0: peak") == ["0 B", "4 GiB", "+4 GiB", ""]


def test_the_passes_whose_starts_differ_most_come_first() -> None:
    starts = Compare(actions=2)(BOTH).split("starts that differ most")[1].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in starts] == ["rank 0: 0B0", "rank 0: 0B1"]
    assert row(Compare()(BOTH), "rank 0: 0B1") == ["7 s", "8 s", "+1 s", "+14.3 %"]


def test_traces_of_two_programs_are_compared_without_their_starts() -> None:
    document = Compare()({"gpipe": named("gpipe", 2, 4), "1f1b": named("1f1b", 2, 4)})
    assert "starts that differ most" not in document
    assert "rank 1: work" in document


def test_traces_of_different_ranks_are_compared_as_wholes() -> None:
    assert "rank 0" not in Compare()({"two": named("1f1b", 2, 4), "four": named("1f1b", 4, 4)})


def test_of_many_ranks_those_that_differ_most_are_shown() -> None:
    document = Compare()({"gpipe": named("gpipe", 20, 4), "1f1b": named("1f1b", 20, 4)})
    assert "ranks (4 that differ less left out)" in document


def test_the_picture_shows_both_one_above_the_other() -> None:
    texts = [text.text for text in ElementTree.fromstring(Compare().svg(BOTH)).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.index("predicted") < texts.index("recorded")


def test_it_prints_on_a_console() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(Compare().renderable(BOTH))
    assert all(text in console.file.getvalue() for text in ("+11.1 %", "+6.7 points", "rank 0: 0B1"))


@pytest.mark.parametrize("traces", [PREDICTED, {"one": PREDICTED}, {"a": PREDICTED, "b": RECORDED, "c": PREDICTED}])
def test_anything_but_two_traces_is_refused(traces: object) -> None:
    with pytest.raises(ViewError, match="a comparison needs two traces"):
        Compare()(traces)  # type: ignore[arg-type]


def test_a_list_of_no_actions_is_refused() -> None:
    with pytest.raises(ViewError, match="actions must be above 0"):
        Compare(actions=0)
