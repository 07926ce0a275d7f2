"""Under torchrun a plan is for the ranks that run, and printed by the first of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import Plan
from penstock.cli.plan import is_torchrun_rank

FILE = """\
import torch
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), torch.ones(8, 4)
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, written: Callable[[str, str], Path]) -> None:
    """This process is the only rank of a torchrun, and there is a model."""
    written("model.py", FILE)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("alone")
def test_the_plan_is_for_the_ranks_that_run(call, tmp_path: Path) -> None:
    assert is_torchrun_rank()
    shown = call("plan", "model.py:build", "--budget", "0.1", "--out", "plan.json")
    assert shown.exit_code == 0
    assert "on 1 rank," in shown.stdout
    assert Plan.load(tmp_path / "plan.json").num_ranks == 1


@pytest.mark.usefixtures("alone")
def test_a_machine_is_not_described_where_it_is_measured(call) -> None:
    shown = call("plan", "model.py:build", "--bandwidth", "1e9")
    assert shown.exit_code == 2
    assert "options that describe the machine must not be given" in shown.stderr


@pytest.mark.usefixtures("alone")
def test_other_ranks_than_those_that_run_are_refused(call) -> None:
    shown = call("plan", "model.py:build", "--ranks", "3")
    assert shown.exit_code == 2
    assert "must be the number of running ranks (got: 3, running: 1)" in shown.stderr
