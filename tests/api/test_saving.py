"""A rank whose function has returned still writes what it began."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.checkpoint import draft
from penstock.checkpoint.listing import verified
from penstock.errors import RunError
from penstock.ir.plan import Plan
from penstock.processes import processes


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
    monkeypatch.setattr("penstock.processes.launch._LEAVE_SECONDS", 0.05)
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
