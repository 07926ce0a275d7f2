"""simulate: figures for people and programs, and files."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Schedule, lower, schedule
from penstock.schedules import SCHEDULES


def figures(call, *arguments: str) -> dict[str, dict]:
    return {row["schedule"]: row for row in json.loads(call("simulate", *arguments, "--json").stdout)}


def test_without_a_name_all_schedules_stand_side_by_side(call) -> None:
    output = call("simulate").output
    assert [line.split()[1] for line in output.splitlines()[2:]] == list(SCHEDULES)


def test_one_schedule_is_drawn_as_well(call) -> None:
    output = call("simulate", "1f1b", "--ranks", 2, "--microbatches", 2).output
    assert "rank 0 F0-F1-" in output
    assert "| 1f1b " in output


def test_a_name_is_found_whatever_its_case_and_punctuation(call) -> None:
    assert list(figures(call, "ZB-H1")) == ["zb_h1"]


@pytest.mark.parametrize(
    ("name", "bubble"),
    {"gpipe": 27.3, "1f1b": 27.3, "looped_bfs": 15.8, "interleaved": 15.8, "zbv": 5.9, "dualpipe_v": 11.1}.items(),
)
def test_json_holds_the_bubble(name: str, bubble: float, call) -> None:
    assert round(100 * figures(call, name)[name]["bubble"], 1) == bubble


def test_json_holds_sizes_seconds_bytes_and_causes(call) -> None:
    row = figures(call, "zbv", "--activation-bytes", "2MiB")["zbv"]
    assert (row["ranks"], row["stages_per_rank"], row["microbatches"]) == (4, 2, 8)
    assert (row["makespan"], row["span_bubble"], row["in_flight"], row["peak_bytes"]) == (25.5, 0.0, 4.0, 4 * 2 * 2**20)
    assert row["idle"].keys() == {"warm_up", "wait", "imbalance", "drain"}


def test_seconds_are_those_of_a_rank_however_many_stages_it_holds(call) -> None:
    rows = figures(call, "all", "--ranks", "1", "--microbatches", "5")
    assert {row["makespan"] for row in rows.values()} == {15.0}


def test_unequal_seconds_move_weight_gradients_into_gaps(call) -> None:
    options = ("--forward", "1", "--input-grad", "1", "--weight-grad", "0.4", "--microbatches", "6")
    given = figures(call, "zb_h1", *options)["zb_h1"]["makespan"]
    assert given <= (6 + 3) * 2.4


def test_latency_makes_a_step_longer(call) -> None:
    fast, slow = (figures(call, "gpipe", "--latency", latency)["gpipe"]["makespan"] for latency in ("0", "0.5"))
    assert (fast, slow) == (33, 36)


def test_overlap_hides_half_of_a_pair(call) -> None:
    apart, together = (figures(call, "dualpipe_v", "--overlap", x)["dualpipe_v"]["makespan"] for x in ("0", "1"))
    assert together < apart


def test_a_sweep_shows_every_number_of_microbatches(call) -> None:
    rows = json.loads(call("simulate", "1f1b", "--sweep", "4,8,16", "--json").stdout)
    assert [row["microbatches"] for row in rows] == [4, 8, 16]
    assert "1f1b, 16 microbatches" in call("simulate", "1f1b", "--sweep", "4,16").output


def test_on_a_terminal_the_drawing_is_coloured(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in call("simulate", "1f1b").output


def test_a_number_that_is_swept_twice_is_shown_once(call) -> None:
    rows = json.loads(call("simulate", "1f1b", "--sweep", "4,8,4", "--json").stdout)
    assert [row["microbatches"] for row in rows] == [4, 8]


def test_microbatches_beside_a_sweep_are_refused(call) -> None:
    result = call("simulate", "1f1b", "--sweep", "4,8", "--microbatches", 16)
    assert result.exit_code == 2
    assert result.stderr.endswith("try: --sweep 4,8,16 for all of them\n")


def test_schedules_that_want_other_stages_are_left_out_of_all_and_named(call) -> None:
    output = call("simulate", "all", "--stages-per-rank", "3").output
    others = [
        name
        for name, member in SCHEDULES.items()
        if member.allowed_stages_per_rank and 3 not in member.allowed_stages_per_rank
    ]
    message = f"left out, because they need another number of stages per rank: {', '.join(others)}"
    assert message[:110] in " ".join(output.split())
    assert "| interleaved " in output


def test_the_csv_is_the_schedule(call, tmp_path: Path) -> None:
    call("simulate", "zbv", "--csv", "zbv.csv")
    assert Schedule.from_csv(tmp_path / "zbv.csv") == schedule("zbv", 4, 8)


def test_pictures_and_traces_are_written(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    call("simulate", "gpipe", "--svg", "a.svg", "--png", "a.png", "--memory-svg", "m.svg", "--trace", "t.json.gz")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "m.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]


def test_written_files_are_listed_beside_the_json(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", "from penstock.cli import main; main()", "simulate", "--json", "--svg", "a.svg"]
    result = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert len(json.loads(result.stdout)) == len(SCHEDULES)
    assert result.stderr == "wrote a.svg\n"


OWN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_the_order_of_a_file_is_simulated(call, written) -> None:
    written("own.csv", OWN)
    assert "own.csv: makespan 9 s" in call("simulate", "own.csv").output
    row = figures(call, "own.csv", "--forward", 2.0)["own.csv"]
    assert (row["ranks"], row["stages_per_rank"], row["microbatches"]) == (2, 1, 2)
    written("program.csv", lower(Schedule.from_csv(OWN)).to_csv())
    assert "program.csv: makespan 9 s" in call("simulate", "program.csv").output


@pytest.mark.parametrize(("name", "typed"), [("orders", "orders"), ("zbv", "./zbv")])
def test_a_file_of_an_order_needs_no_suffix(name: str, typed: str, call, written) -> None:
    written(name, "0F0,0B0\n")
    (found,) = json.loads(call("simulate", typed, "--json").stdout)
    assert (found["ranks"], found["microbatches"]) == (1, 1)


def test_an_order_of_a_file_that_deadlocks_is_refused(call, written) -> None:
    written("bad.csv", "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    result = call("simulate", "bad.csv")
    assert result.exit_code == 2
    assert "deadlock" in result.output


@pytest.mark.parametrize("option", [("--ranks", 3), ("--sweep", "2,4"), ("--microbatches", 8)])
def test_sizes_beside_a_file_are_refused(option: tuple[str, object], call, written) -> None:
    written("own.csv", OWN)
    result = call("simulate", "own.csv", *option)
    assert result.exit_code == 2
    assert "ranks, stages and microbatches must not be given" in result.output
    assert "no such file" in call("simulate", "missing.csv").output
