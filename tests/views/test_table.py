"""The table of figures."""

import io

from rich.console import Console

from penstock.views import Table, summary
from penstock.views.table import in_flight
from tests.views.samples import PAIR, heavy, named, run


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_per_trace_has_its_figures() -> None:
    header, _, line = Table()({"1f1b": named("1f1b", 4, 8)}).splitlines()
    assert dict(zip(cells(header), cells(line), strict=True)) == {
        "trace": "1f1b",
        "makespan": "33 s",
        "bubble": "27.3 %",
        "span bubble": "27.3 %",
        "in flight": "4",
        "messages": "48",
        "warm-up": "4.5 %",
        "wait": "13.6 %",
        "imbalance": "0.0 %",
        "drain": "9.1 %",
    }


def test_traces_keep_the_order_in_which_they_are_given() -> None:
    lines = Table()({name: named(name, 2, 4) for name in ("zbv", "1f1b", "gpipe")}).splitlines()
    assert [cells(line)[0] for line in lines[2:]] == ["zbv", "1f1b", "gpipe"]


def test_bytes_are_shown_where_there_are_any() -> None:
    with_bytes, without = (Table()(trace).splitlines() for trace in (heavy(), named("1f1b", 2, 2)))
    assert "peak" in cells(with_bytes[0])
    assert "4 GiB" in cells(with_bytes[2])
    assert "peak" not in cells(without[0])


def test_the_causes_add_up_to_the_bubble() -> None:
    figures = summary(named("1f1b", 4, 8))
    assert abs(sum(figures.idle) - figures.bubble) < 1e-12


def test_a_bar_in_a_name_does_not_break_the_table() -> None:
    assert r"| a\|b " in Table()({"a|b": run("0F0,0B0")})


def test_the_table_prints_on_a_console_with_every_figure() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(Table().renderable({"[red]x": named("1f1b", 4, 8)}))
    assert all(text in console.file.getvalue() for text in ("[red]x", "33 s", "27.3 %", "imbalance"))


def test_one_of_two_stages_counts_half_in_flight() -> None:
    assert max(in_flight(named("interleaved", 4, 8))) == 5.5


def test_in_flight_falls_towards_the_last_rank_of_1f1b() -> None:
    assert in_flight(named("1f1b", 4, 8)) == (4.0, 3.0, 2.0, 1.0)


def test_an_overlapped_pair_holds_both_microbatches() -> None:
    assert in_flight(run(PAIR)) == (2.0,)
