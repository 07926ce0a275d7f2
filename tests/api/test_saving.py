"""A rank whose function has returned still writes what it began."""

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
from penstock.checkpoint import draft, verified
from penstock.errors import RunError
from penstock.ir import Plan
from penstock.launch import Board, explain, processes


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
    """Begin a save, and be done."""
    penstock.Pipeline(model(), plan, loss_fn=nn.MSELoss()).save(root, asynchronous=True)


def test_a_save_that_takes_long_is_waited_for(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        return written(*args)

    written = draft._written
    monkeypatch.setattr(draft, "_written", slow)
    monkeypatch.setattr("penstock.launch.launch._LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(processes, "_TERM_SECONDS", 0.05)
    penstock.launch(saved, 2, plan, tmp_path)
    assert [(one.name, one.problem) for one in verified(tmp_path)] == [("step-000000", "")]


def test_a_save_that_fails_after_the_last_step_is_an_error(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(draft, "_written", full)
    with pytest.raises(RunError, match="No space left on device"):
        penstock.launch(saved, 2, plan, tmp_path)


def hung(plan: Plan, root: Path) -> None:
    """Save; the second rank is long in writing."""

    def written(*args: Any) -> Any:
        time.sleep(1.0 if dist.get_rank() == 1 else 0.0)
        return write(*args)

    write = draft._written
    with mock.patch.object(draft, "_written", written):
        penstock.Pipeline(model(), plan, loss_fn=nn.MSELoss()).save(root)


def test_who_is_long_in_writing_is_the_one_that_did_not_come(plan: Plan, tmp_path: Path) -> None:
    told: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(penstock.launch, hung, 2, plan, tmp_path / "saved", board=tmp_path / "board")
        while not running.done():
            told.append(explain(Board.read(tmp_path / "board"), time.monotonic()))
            time.sleep(0.05)
        running.result()
    named = [words.splitlines()[0] for words in told if "did not come to the saving of a checkpoint" in words]
    assert len(named) > 5
    assert {line.partition(":")[0] for line in named} == {"rank 1"}
