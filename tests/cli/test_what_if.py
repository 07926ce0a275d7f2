"""`penstock what-if` as text, JSON and a report."""

import json
from pathlib import Path

from typer.testing import CliRunner

from penstock.cli import app
from penstock.ir import StageCosts
from penstock.passes import lower
from penstock.schedules import build
from penstock.simulate import simulate
from penstock.views import Chrome


def call(*arguments: object):
    return CliRunner().invoke(app, ["what-if", *map(str, arguments)])


def write_trace(path: Path) -> Path:
    costs = StageCosts((1.0, 2.0), (1.0, 2.0), (1.0, 2.0))
    path.write_text(Chrome()(simulate(lower(build("1f1b", 2, 4)), costs)))
    return path


def test_text_json_and_report(tmp_path):
    file, page = write_trace(tmp_path / "trace.json"), tmp_path / "page.html"
    shown = call(file, "--budget", 0.05, "--out", page)
    assert shown.exit_code == 0, shown.output
    assert "stage 1 takes 1.33 times the mean" in shown.output
    assert "<svg" in page.read_text()
    found = json.loads(call(file, "--json", "--budget", 0).stdout)
    assert found["parts"][0]["number"] == 1
    assert found["bound"] <= found["simulated"]


def test_a_file_without_passes_is_refused(tmp_path):
    file = tmp_path / "trace.json"
    assert call(file).exit_code == 2
    file.write_text('{"traceEvents": []}')
    refused = call(file)
    assert refused.exit_code == 2
    assert "no passes of a pipeline" in refused.output


def test_a_report_is_not_written_over_any_of_the_files(tmp_path):
    files = [write_trace(tmp_path / name) for name in ("first.json", "second.json")]
    before = files[1].read_text()
    refused = call(*files, "--budget", 0, "--out", files[1])
    assert refused.exit_code == 2
    assert "the output would overwrite its input" in refused.output
    assert files[1].read_text() == before


def test_a_directory_is_refused(tmp_path):
    refused = call(tmp_path)
    assert refused.exit_code == 2
    assert "must be a file, got a directory" in refused.output
    assert "run.json" in refused.output


def test_microbatches_are_refused_for_a_trace_that_has_them(tmp_path):
    refused = call(write_trace(tmp_path / "trace.json"), "--microbatches", 64)
    assert refused.exit_code == 2
    assert "must not be given: the file has it" in refused.output


def test_a_trace_of_predicted_and_measured_steps_is_refused_with_the_file_to_take(tmp_path):
    file = tmp_path / "trace.json"
    trace = simulate(lower(build("1f1b", 2, 4)))
    file.write_text(Chrome()({"predicted": trace, "measured": trace}))
    refused = call(file)
    assert refused.exit_code == 2
    assert "the run.json beside it" in refused.output
