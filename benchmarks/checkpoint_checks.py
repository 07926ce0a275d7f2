"""Checks that damaged and forged checkpoints are detected, files are private, and sockets listen on loopback only."""

import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

import penstock
from benchmarks.damages import ELSEWHERE, damaged, forged
from benchmarks.short_training import MODEL, ShortTraining
from benchmarks.table import Line, Table
from benchmarks.watched_training import WatchedTraining, is_local, left_over, listeners
from penstock.checkpoint import CheckpointDir
from penstock.cli.models import build_model
from penstock.errors import CheckpointError, DamagedError
from penstock.ir import Plan
from penstock.launch.scratch import SCRATCH_VARIABLE

_TIMEOUT_SECONDS = 300.0
Load = Callable[[Path], int | None]
"""loads a checkpoint and returns its step"""


def checkpoint_checks(damages: int = 200) -> Table:
    """The number of checks of each kind, and how many passed."""

    def lines() -> Iterator[Line]:
        with ShortTraining.made(2) as training, _own_scratch(training.directory) as scratch:
            training.run()
            saved = training.directory / "saved"
            for ranks in (2, 3):
                yield _line(f"damaged, {ranks} ranks", damages // 2, _count_skipped(training, ranks, damages // 2))
            with _loader(training, MODEL) as load:
                refused = _count_refused(saved, load)
            yield _line("paths elsewhere", len(ELSEWHERE), refused)
            with _loader(training, MODEL.replace("range(6)", "range(5)")) as load:
                is_refused = _refuses_mismatch(saved, load)
            yield _line("another model", 1, int(is_refused))
            modes = [_is_private(path) for path in (saved, *saved.rglob("*"))]
            yield _line("private files", len(modes), sum(modes))
            yield from _sockets(training)
            left = left_over(scratch, training.directory)
            yield Line(("left behind", str(len(left)), ""), len(left), 0.0, at_least=False)

    title = "damaged checkpoints skipped, forged and mismatched ones refused; file modes, sockets, leftovers"
    return Table(title, ("", "checks", "passed"), lines())


def _line(name: str, checks: int, passed: int) -> Line:
    return Line((name, str(checks), str(passed)), passed, checks)


@contextmanager
def _own_scratch(directory: Path) -> Iterator[Path]:
    """Makes trainings put their temporary files into a directory of this benchmark."""
    scratch = directory / "temporary"
    scratch.mkdir()
    with patch.dict(os.environ, {SCRATCH_VARIABLE: os.fspath(scratch)}):
        yield scratch


@contextmanager
def _loader(training: ShortTraining, model: str) -> Iterator[Load]:
    """Yields a function that loads checkpoints into a model."""
    # Separate files, because Python would use the compiled code of a file with the same size and time.
    path = training.directory / ("loading.py" if model == MODEL else "loading_other.py")
    path.write_text(model, encoding="utf-8")
    with build_model(f"{path}:build") as build:
        plan = Plan.load(training.directory / "plan.json")
        if model != MODEL:
            plan = penstock.plan(build.model, build.args, ranks=1, microbatches=1, schedule="gpipe", budget_seconds=0.0)
        pipe = penstock.Pipeline(build.model, plan, loss_fn=torch.nn.functional.mse_loss, local=True)
        optimizer = torch.optim.AdamW(pipe.parameters())
        yield lambda place: pipe.load(place, optimizer).step


def _count_skipped(training: ShortTraining, ranks: int, rounds: int) -> int:
    """Counts the damaged checkpoints that all ranks skip: they load the one before, with a warning."""
    saved = training.directory / "saved"
    newest, before = (path.name for path in CheckpointDir(saved).checkpoints[:2])
    plan = training.plan_for(ranks)
    with tempfile.TemporaryDirectory() as name:
        copies = [damaged(saved, Path(name) / str(number), ranks * rounds + number) for number in range(rounds)]
        first, *others = penstock.launch(_load_all, ranks, training.directory, plan, copies)
    expected = [int(before.removeprefix("step-"))] * rounds
    are_alike = all([step for step, _ in found] == expected for found in others)
    return are_alike * sum(
        step == right and newest in warning and f"resumes from {before}" in warning
        for (step, warning), right in zip(first, expected, strict=True)
    )


def _load_all(directory: Path, plan: Plan, places: list[Path]) -> list[tuple[int | None, str]]:
    """Loads every checkpoint on this rank; returns their steps and the warnings."""
    found = []
    with build_model(f"{directory / 'model.py'}:build") as build:
        pipe = penstock.Pipeline(build.model, plan, loss_fn=torch.nn.functional.mse_loss)
        optimizer = torch.optim.AdamW(pipe.parameters())
        for place in places:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step = pipe.load(place, optimizer).step
            found.append((step, "".join(str(one.message) for one in caught)))
    return found


def _count_refused(saved: Path, load: Load) -> int:
    """Counts the refused checkpoints whose manifest or link leads out of their directory."""
    good = 0
    with tempfile.TemporaryDirectory() as name:
        for number, elsewhere in enumerate(ELSEWHERE):
            place = Path(name) / str(number)
            shutil.copytree(CheckpointDir(saved).checkpoints[0], place)
            forged(place, elsewhere)
            try:
                load(place)
            except DamagedError:
                good += 1
    return good


def _refuses_mismatch(saved: Path, load: Load) -> bool:
    """Whether a checkpoint of another model is refused with an error that names the difference."""
    try:
        load(saved)
    except CheckpointError as error:
        return "do not match the names of the model" in str(error) and "unexpected: 5.0.weight, 5.0.bias" in str(error)
    return False


def _is_private(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def _sockets(training: ShortTraining) -> Iterator[Line]:
    """Checks the addresses on which a running training listens."""
    with WatchedTraining(training.directory, every=20) as running:
        running.wait_for_steps(5, _TIMEOUT_SECONDS)
        found = listeners([running.pid, *running.pids])
        running.stop()
    if found is None:
        yield Line(("not checked: ss not found", "", ""), 0.0, 0.0)
    else:
        yield _line("sockets", max(1, len(found)), sum(map(is_local, found)))
