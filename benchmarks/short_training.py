"""A short `penstock train` in this process, with or without injected faults, and its outcome."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from typer.testing import CliRunner

from penstock.checkpoint import list_checkpoints, verify_checkpoints
from penstock.cli import app
from penstock.ir import Plan
from penstock.launch import ALLOW_VARIABLE

RANKS, STEPS, EVERY = 3, 10, 3
MODEL = """\
import torch
from torch import nn

def build():
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*blocks), torch.ones(8, 16)

def batches():
    while True:
        yield torch.randn(8, 16), torch.randn(8, 16)
"""
_RESTART = re.compile(r"^restart \d+ of", re.MULTILINE)
COMMAND = ("train", "model.py:build", "--data", "model.py:batches", "--loss", "mse_loss", "--plan", "plan.json")
"""arguments of `penstock` in a directory with this model and a plan"""


@contextmanager
def _stderr_of_ranks(path: Path) -> Iterator[None]:
    """Appends to a file what processes started in the body write to stderr, such as the stack of a rank that aborts."""
    before = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run."""

    exit_code: int
    output: str
    losses: tuple[float, ...]
    bad: tuple[str, ...]
    """damaged checkpoints, and incomplete ones that are left"""

    @property
    def restarts(self) -> int:
        """The number of restarts."""
        return len(_RESTART.findall(self.output))


@dataclass(frozen=True)
class ShortTraining:
    """A directory with a model and a plan to train."""

    directory: Path

    @classmethod
    @contextmanager
    def made(cls, ranks: int = RANKS) -> "Iterator[ShortTraining]":
        """Creates the model and the plan in a temporary directory."""
        with TemporaryDirectory(prefix="penstock-") as name:
            training = cls(Path(name))
            (training.directory / "model.py").write_text(MODEL, encoding="utf-8")
            training.plan_for(ranks, "plan.json")
            yield training

    def plan_for(self, ranks: int, file: str = "other.json") -> Plan:
        """Plans for a number of ranks; returns the plan, which is also written to a file."""
        options = ("--ranks", ranks, "--microbatches", "4", "--schedule", "1f1b", "--budget", "0")
        code, output = self.call("plan", "model.py:build", *options, "--out", file)
        assert code == 0, output
        return Plan.load(self.directory / file)

    def call(self, *arguments: object) -> tuple[int, str]:
        """Runs a `penstock` command; returns its exit code and output."""
        errors = self.directory / "errors.txt"
        with chdir(self.directory), patch.dict(os.environ, {ALLOW_VARIABLE: "1"}), _stderr_of_ranks(errors):
            result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        return result.exit_code, result.output

    def run(self, faults: Iterable[str] = (), *options: object, steps: int = STEPS, fresh: bool = True) -> Outcome:
        """Trains with the given faults; `fresh` removes the checkpoints and output of earlier runs first."""
        if fresh:
            for name in ("out", "saved"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
        given = [word for fault in faults for word in ("--fault", fault)]
        saving = ("--checkpoint", "saved", "--every", EVERY, "--out", "out", "--steps", steps)
        code, output = self.call(*COMMAND, *saving, *given, *options)
        return Outcome(code, output, self._losses(), self._bad())

    def _losses(self) -> tuple[float, ...]:
        path = self.directory / "out" / "steps.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return tuple(json.loads(line)["loss"] for line in lines)

    def _bad(self) -> tuple[str, ...]:
        saved = self.directory / "saved"
        if not saved.exists() or not any(saved.iterdir()):
            return ()
        broken = [found.name for found in verify_checkpoints(saved) if found.problem]
        return (*broken, *(found.name for found in list_checkpoints(saved) if not found.written))
