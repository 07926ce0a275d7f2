"""report: a plan, a run or a directory of one becomes a page; anything else is refused."""

import json
from pathlib import Path

import pytest

from penstock import schedule
from penstock.ir import save_record, to_json
from tests.views.reports import contents, planned


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    planned().save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_plan_becomes_a_page(plan: Path, call, tmp_path: Path) -> None:
    result = call("report", plan)
    assert result.exit_code == 0
    assert result.output.startswith("wrote report.html (")
    assert "Plan report" in (tmp_path / "report.html").read_text()


def test_a_directory_with_a_run_becomes_the_page_of_the_run(plan: Path, call, tmp_path: Path) -> None:
    contents().run.save(tmp_path / "run.json")
    call("report", tmp_path, "--out", "page.html")
    assert "Training report" in (tmp_path / "page.html").read_text()


def test_a_directory_with_a_plan_alone_will_do(plan: Path, call, tmp_path: Path) -> None:
    assert call("report", tmp_path).exit_code == 0
    assert "Plan report" in (tmp_path / "report.html").read_text()


def test_the_figures_are_there_for_programs(plan: Path, call, tmp_path: Path) -> None:
    answer = json.loads(call("report", plan, "--json").stdout)
    assert answer["bytes"] == (tmp_path / "report.html").stat().st_size
    assert answer["predicted_seconds"] == planned().predicted.makespan
    assert answer["measured_seconds"] is None
    assert len(answer["plan"]) == 64
    assert all(0.005 <= each["gain"] < 1 for each in answer["advice"])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.json", "cannot read the file"),
        ("empty", "neither a run nor a plan"),
        ("schedule.csv", "only a plan or a run has a report (file: schedule.csv, got: Schedule)"),
        ("costs.json", "got: StageCosts"),
        ("torn.json", "not JSON"),
    ],
)
def test_another_file_is_refused_and_nothing_is_written(name: str, problem: str, call, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "schedule.csv").write_text(schedule("1f1b", 2, 2).to_csv())
    save_record(planned().costs, tmp_path / "costs.json")
    (tmp_path / "torn.json").write_text(to_json(planned())[:500])
    result = call("report", name)
    assert result.exit_code == 2
    assert problem in result.output
    assert not (tmp_path / "report.html").exists()


def test_the_plan_is_not_written_over(plan: Path, call) -> None:
    before = plan.read_text()
    result = call("report", plan, "--out", plan)
    assert result.exit_code == 2
    assert "would overwrite its input" in result.output
    assert plan.read_text() == before
