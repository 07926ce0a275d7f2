"""selftest runs parity, prediction, memory and faults on real processes, and writes JSON and a page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.demo.selftest import SelfTest
from penstock.ir import seconds_text

RESULT = SelfTest(
    {"device": "cpu | fast", "ranks": "2"},
    3.0,
    [{"schedule": "1f1b", "dtype": "float32", "backend": "gloo", "largest": 1e-7, "tensor": "loss", "ok": True}],
    {
        "schedule": "zbv",
        "predicted_seconds": 0.1,
        "measured_seconds": 0.12,
        "error": 0.2,
        "samples_per_second": 100.0,
    },
    [{"rank": 0, "predicted_bytes": 1000, "measured_bytes": 1100, "error": 0.1}],
    [
        {
            "fault": "a rank that hangs",
            "backend": "gloo",
            "seconds": None,
            "deadline_seconds": 2.0,
            "error": "no error",
            "ok": False,
        }
    ],
)


@pytest.mark.gloo
def test_the_quick_form_passes_here_and_writes_both_files(call, tmp_path: Path) -> None:
    result = call("selftest", "--quick", "--json", "--out", "results")
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "results" / "selftest.json").read_text())
    assert data == json.loads(result.stdout)
    assert data["problems"] == []
    assert float(data["machine"]["load before"]) >= 0
    assert [each["schedule"] for each in data["parity"]] == ["1f1b", "zbv"]
    assert max(each["largest"] for each in data["parity"]) < 1e-5
    assert data["prediction"]["measured_seconds"] > 0
    assert all(abs(each["error"]) < 0.5 for each in data["memory"])
    hang, kill = data["failures"]
    assert 2.0 <= hang["seconds"] < 10.0
    assert hang["error"].startswith("rank 1: no progress, working on 1F1 of step 1")
    assert kill["error"].startswith("a rank was killed (rank: 1, signal: SIGKILL")
    page = (tmp_path / "results" / "selftest.md").read_text()
    assert page.startswith("# penstock selftest: passed\n")
    assert "| a rank that is killed |" in page


def test_what_failed_is_in_the_title_and_the_data() -> None:
    assert RESULT.problems == ["a rank that hangs"]
    wrong = replace(RESULT, parity=[{**RESULT.parity[0], "ok": False}])
    assert wrong.problems == ["parity of 1f1b (float32, gloo)", "a rank that hangs"]
    assert wrong.page().startswith("# penstock selftest: failed: parity of 1f1b (float32, gloo), a rank that hangs\n")
    assert json.loads(wrong.to_json())["problems"] == wrong.problems


def test_the_page_is_markdown_that_can_be_posted() -> None:
    page = RESULT.page()
    assert "| device | cpu \\| fast |" in page
    assert f"| zbv | {seconds_text(0.1)} | {seconds_text(0.12)} | 20.0 % | 100 |" in page
    assert "| a rank that hangs | gloo | never | FAILED | no error |" in page


def test_a_device_that_is_not_here_is_refused(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    result = call("selftest", "--device", "cuda")
    assert result.exit_code == 2
    assert result.stderr.startswith("device must be one of this machine (got: cuda, found: cpu)\ntry: --device cpu")


def test_a_directory_that_cannot_be_written_is_refused_before_the_tests(call, tmp_path: Path) -> None:
    (tmp_path / "page" / "selftest.md").mkdir(parents=True)
    result = call("selftest", "--out", "page")
    assert result.exit_code == 2
    assert "expected a file, got a directory (file: page/selftest.md)" in result.output
