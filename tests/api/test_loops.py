"""The training script with nanoGPT's loop: the changes shown in the documentation are enough, and keep its numbers."""

import contextlib
import difflib
import io
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

import penstock
from tests.process_pool import Pools

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "examples" / "nanogpt"


def changed_lines() -> list[str]:
    before, after = ((SCRIPTS / name).read_text().splitlines() for name in ("train.py", "train_pipeline.py"))
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@")]


def test_at_most_eight_lines_change() -> None:
    assert sum(line.startswith("+") for line in changed_lines()) == 8
    assert sum(line.startswith("-") for line in changed_lines()) == 7


def test_the_documentation_shows_the_changes() -> None:
    page = (REPOSITORY / "docs" / "how_to.md").read_text()
    [shown] = re.findall(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [line for line in shown.splitlines() if line[:1] in ("+", "-")] == changed_lines()


def run_script(name: str, directory: str) -> list[str]:
    """The lines that a script prints."""
    output = io.StringIO()
    plan = partial(penstock.plan, partitioner="uniform", schedule="1f1b", budget_seconds=0.0)
    # The processes of a pool are connected already; a search would take longer than the training.
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(penstock, "plan", plan),
        mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]),
        mock.patch.dict(os.environ, {"OUT_DIR": directory}),
        contextlib.redirect_stdout(output),
    ):
        os.environ.pop("RANK", None)
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    return output.getvalue().splitlines()


@pytest.mark.gloo
def test_the_script_prints_the_losses_of_one_process(pools: Pools, tmp_path: Path) -> None:
    expected = run_script("train.py", str(tmp_path / "plain"))
    assert len(expected) == 10
    assert pools[2].run(run_script, "train_pipeline.py", str(tmp_path / "saved")) == [expected, expected]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-000000", "step-000008"]
