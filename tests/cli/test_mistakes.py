"""Common mistakes: each is answered by what is wrong, where, and what to try; never by a traceback."""

import json
from pathlib import Path

import pytest

MISTAKES = {
    "a command that does not exist": (("simulat",), "simulat"),
    "an option that does not exist": (("simulate", "--rank", "4"), "--ranks"),
    "a number that is none": (("simulate", "--ranks", "four"), "--ranks"),
    "no file to check": (("check",), "FILE"),
    "a schedule that is misspelled": (("simulate", "zbw"), "did you mean zbv?"),
    "a schedule that is unheard of": (("simulate", "frobnicate"), "one of gpipe, 1f1b"),
    "no ranks": (("simulate", "gpipe", "--ranks", "0"), "ranks must be a whole number, 1 or more"),
    "no microbatches": (("simulate", "gpipe", "--microbatches", "0"), "microbatches must be a whole number"),
    "too many ranks": (("simulate", "gpipe", "--ranks", "9999"), "limits: (8192, 65536"),
    "stages that the schedule cannot hold": (("simulate", "zbv", "--stages-per-rank", "3"), "try: --stages-per-rank 2"),
    "a sweep that is no list": (("simulate", "--sweep", "4;8"), "try: --sweep 4,8,16"),
    "a negative time": (("simulate", "gpipe", "--forward", "-1"), "forward must be a finite number, 0 or more"),
    "a time that is no number": (("simulate", "gpipe", "--latency", "nan"), "latency must be finite seconds"),
    "more overlap than there is": (("simulate", "gpipe", "--overlap", "2"), "overlap is a share between 0 and 1"),
    "a size without a known unit": (("simulate", "--activation-bytes", "3XB"), 'or "24GiB"'),
    "one CSV for all schedules": (("simulate", "--csv", "all.csv"), "try: penstock simulate gpipe --csv all.csv"),
    "a picture in a missing directory": (("simulate", "--svg", "missing/a.svg"), "try: mkdir -p missing"),
    "two pictures in one file": (("simulate", "--svg", "a.svg", "--png", "a.svg"), "two outputs have the same file"),
    "one file by two paths": (("simulate", "--svg", "a", "--trace", "./a"), "two outputs have the same file (file: a)"),
    "a picture over a directory": (("simulate", "--svg", "."), "a directory stands where the file should go"),
    "a file that is not there": (("check", "none.csv"), "cannot read the file (file: none.csv, reason: no such file"),
    "a directory instead of a file": (("show", "."), "cannot read the file (file: ., reason: is a directory)"),
}
BAD_FILES = {
    "an empty file": ("", "an empty schedule"),
    "a cell that is no action": ("0F0,0B0,0X1\n", "row: 1, column: 3, cell: '0X1'"),
    "a stage on two ranks": ("0F0,0B0\n0F1,0B1\n", "a stage on two ranks (file:"),
    "JSON that ends early": ('{"penstock": 1,', "not JSON"),
    "JSON of something else": ('{"name": "x"}', "not a penstock document"),
    "a noun that does not exist": ('{"penstock": 1, "noun": "Plane", "value": {}}', "no such noun"),
    "a newer format": ('{"penstock": 2, "noun": "Plan", "value": {}}', "try: a newer penstock"),
    "a key that is missing": ('{"penstock": 1, "noun": "Placement", "value": {}}', "path: value.ranks"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained_and_ends_with_2(mistake: str, call) -> None:
    arguments, explanation = MISTAKES[mistake]
    result = call(*arguments)
    assert explanation in result.output
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize("verb", ["check", "show"])
@pytest.mark.parametrize("mistake", BAD_FILES)
def test_a_bad_file_is_located_and_ends_with_2(mistake: str, verb: str, call, written) -> None:
    text, explanation = BAD_FILES[mistake]
    result = call(verb, written("bad", text))
    assert explanation in result.output
    assert result.exit_code == 2


def test_a_file_that_is_no_text_is_refused(call, tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(128, 256)))
    result = call("show", "noise")
    assert "cannot read" in result.output
    assert result.exit_code == 2


def test_orders_that_block_are_refused_with_the_rank_and_the_action(call, written) -> None:
    result = call("check", written("blocked.csv", "0F0,0B0\n1B0,1F0\n"))
    assert "rank 1 stands at 1B0 (position 0), which needs 1F0" in result.output
    assert result.exit_code == 2


def test_what_cannot_be_proven_is_told_to_programs_as_well(call, written) -> None:
    result = call("check", "--json", written("half.csv", "0F0\n1F0,1B0\n"))
    answer = json.loads(result.stdout)
    assert not answer["proven"]
    assert answer["stage"] == "0"
    assert result.exit_code == 2


@pytest.mark.parametrize("mistake", BAD_FILES)
def test_a_bad_file_is_told_to_programs_as_well(mistake: str, call, written) -> None:
    result = call("check", "--json", written("bad", BAD_FILES[mistake][0]))
    answer = json.loads(result.stdout)
    assert not answer["proven"]
    assert answer["problem"]
    assert result.exit_code == 2


@pytest.mark.parametrize("target", ["s.csv", "./s.csv", "link.csv"])
def test_a_file_is_not_written_over_what_it_is_made_from(target: str, call, written, tmp_path: Path) -> None:
    file = written("s.csv", "0F0,0B0\n")
    (tmp_path / "link.csv").symlink_to(file)
    result = call("trace", file, target)
    assert "the file would be written over what it is made from" in result.output
    assert result.exit_code == 2
    assert file.read_text() == "0F0,0B0\n"


def test_devices_may_be_named_twice(call) -> None:
    assert call("simulate", "gpipe", "--svg", "/dev/null", "--trace", "/dev/null").exit_code == 0


def test_costs_cannot_be_proven_or_traced(call, written) -> None:
    placement = written("placement.json", '{"penstock": 1, "noun": "Placement", "value": {"ranks": [0, 1]}}')
    assert "nothing to prove (noun: Placement)" in call("check", placement).output
    assert "nothing that runs" in call("trace", placement, "out.json").output


def test_a_file_in_the_place_of_the_directory_of_the_demo_is_refused(call, written) -> None:
    result = call("demo", "--out", written("taken", "mine"))
    assert "try: --out another-directory" in result.output
    assert result.exit_code == 2
