"""demo: a small GPT planned, trained on processes, compared with one process, and reported."""

import gzip
import json
from importlib import import_module
from pathlib import Path

import pytest

from penstock.demo import training
from penstock.errors import RunError
from penstock.ir import Run

FILES = {"plan.json", "run.json", "trace.json.gz", "report.html"}
QUICK = ("--ranks", "2", "--steps", "3")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.demo.SEARCH_SECONDS", 0.1)


@pytest.fixture(params=["small", pytest.param("full", marks=pytest.mark.whole)])
def size(request: pytest.FixtureRequest) -> None:
    """The demo with a smaller GPT, and as users run it."""
    if request.param == "small":
        request.getfixturevalue("small")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller GPT."""
    sizes = training.SIZES._replace(layers=4, width=16, length=8, samples=8, microbatches=4)
    monkeypatch.setattr(training, "SIZES", sizes)


@pytest.mark.usefixtures("size")
def test_the_demo_trains_like_one_process_and_writes_a_report(call, tmp_path: Path) -> None:
    result = call("demo", *QUICK)
    assert result.exit_code == 0, result.output
    assert "cannot deadlock" in result.output
    assert ", measured " in result.output
    lines = result.output.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110
    table = lines[next(index for index, line in enumerate(lines) if "tokens/s" in line and "speedup" in line) :][:4]
    assert [line.split()[-2].replace(",", "").isdecimal() for line in table[1:]] == [True] * 3
    assert lines.index("what next") > lines.index(table[0])
    out = tmp_path / "penstock-demo"
    assert {path.name for path in out.iterdir()} == FILES
    run = Run.load(out / "run.json")
    assert len(run.steps) == 3
    assert run.largest_difference is not None
    assert run.largest_difference < 1e-5
    names = {event["args"]["name"] for event in _events(out) if event["name"] == "process_name"}
    assert {name.partition(":")[0] for name in names} == {"predicted", "measured"}


def _events(out: Path) -> list[dict[str, object]]:
    return json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]


@pytest.mark.usefixtures("small")
def test_the_demo_writes_its_results_as_json(call) -> None:
    found = json.loads(call("demo", *QUICK, "--out", "there", "--json").stdout)
    assert len(found["losses"]) == 3
    assert found["predicted_seconds"] > 0
    assert len(found["tokens_per_second"]) == 3
    assert min(found["tokens_per_second"].values()) > 0
    assert {Path(path).name for path in found["files"]} == FILES


@pytest.mark.parametrize(("cores", "ranks"), [(1, 2), (2, 2), (4, 4), (64, 8)])
def test_there_are_as_many_ranks_as_cores(cores: int, ranks: int, call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def plan(given: int, *_: object) -> None:
        asked.append(given)
        raise RunError("enough")

    # By its module: `penstock.launch` is a function.
    monkeypatch.setattr(import_module("penstock.launch"), "num_cores", lambda: cores)
    monkeypatch.setattr("penstock.cli.demo._plan", plan)
    assert call("demo").exit_code == 5
    assert asked == [ranks]


@pytest.mark.usefixtures("small")
def test_a_pipeline_that_trains_otherwise_fails_the_demo(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.demo.training.largest_difference", lambda ranks, plain: 0.5)
    result = call("demo", "--ranks", "2", "--steps", "1")
    assert result.exit_code == 5
    assert "the pipeline differs from one process (5.0e-01)" in result.output


def test_a_file_in_the_place_of_the_directory_is_refused_before_anything_is_measured(call, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    result = call("demo", "--out", "there")
    assert result.exit_code == 2
    assert "must be a directory, got a file (directory: there)" in result.output
