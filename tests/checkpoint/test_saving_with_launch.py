"""Saves of launched ranks: a rank finishes its save although its function has returned."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
from penstock.checkpoint import verify_checkpoints, writer
from penstock.errors import RunError
from penstock.ir import Plan
from penstock.launch import StatusFile, explain_hang, launcher
from tests.leftovers import wait_until


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    x = torch.ones(4, 4)
    return penstock.plan(
        model(), (x,), ranks=2, microbatches=2, schedule="1f1b", budget_seconds=0.0, loss_fn=nn.MSELoss()
    )


def saved(plan: Plan, root: Path) -> None:
    """Start a save and return."""
    penstock.Pipeline(model(), plan, loss_fn=nn.MSELoss()).save(root, asynchronous=True)


def test_a_slow_save_is_waited_for(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        return written(*args)

    written = writer.write_file
    monkeypatch.setattr(writer, "write_file", slow)
    monkeypatch.setattr(launcher, "_EXIT_SECONDS", 0.05)
    monkeypatch.setattr(launcher, "_TERM_SECONDS", 0.05)
    penstock.launch(saved, 2, plan, tmp_path)
    assert [(one.name, one.problem) for one in verify_checkpoints(tmp_path)] == [("step-000000", "")]


def test_a_save_that_fails_after_the_last_step_is_an_error(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_file", full)
    with pytest.raises(RunError, match="No space left on device"):
        penstock.launch(saved, 2, plan, tmp_path)


def slow_save(plan: Plan, root: Path) -> None:
    """Save; rank 1 begins to write and continues when the test allows it."""

    def written(*args: Any) -> Any:
        if dist.get_rank() == 1:
            (root / "writing").touch()
            wait_until(lambda: (root / "continue").exists())
        return write(*args)

    write = writer.write_file
    with mock.patch.object(writer, "write_file", written):
        penstock.Pipeline(model(), plan, loss_fn=nn.MSELoss()).save(root)


def test_a_hang_report_names_the_rank_that_is_slow_to_write(plan: Plan, tmp_path: Path) -> None:
    root, statuses = tmp_path / "saved", tmp_path / "status"
    root.mkdir()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(penstock.launch, slow_save, 2, plan, root, status_dir=statuses)
        try:
            # Before that, either rank may wait for the other one at the syncs that begin a save.
            wait_until((root / "writing").exists)
            # Rank 0 may not yet have returned from those syncs, but in the end it can only wait for rank 1.
            expected = "rank 1: has not reached the save before step 0, "
            wait_until(lambda: explain_hang(StatusFile.read(statuses), time.monotonic()).startswith(expected))
        finally:
            (root / "continue").touch()
        running.result()
