"""concurrent_checkpoints: one process saves and prunes, one loads and one verifies, all in the same directory.

The number of failures must be 0.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import penstock
from benchmarks.table import Line, Table
from penstock.cli import app

_MAX_ERRORS_SHOWN = 3


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return tuple(concurrent_checkpoints(keep) for keep in (1, 2))


def concurrent_checkpoints(keep: int, saves: int = 1000, loads: int = 2000, verifies: int = 2000) -> Table:
    """Counts the saves, loads and verifications that fail; all processes run until each kind has reached its number."""

    def lines() -> Iterator[Line]:
        with tempfile.TemporaryDirectory(prefix="penstock-") as name:
            directory, context = Path(name), get_context("fork")
            training = _training()
            _save(training, directory, keep)
            counts = {"saves": saves, "loads": loads, "verifies": verifies}
            done = {kind: context.Value("i", 0) for kind in counts}
            queue = context.SimpleQueue()

            def is_unfinished() -> bool:
                return any(done[kind].value < number for kind, number in counts.items())

            workers = {
                "saves": lambda: _save(training, directory, keep),
                "loads": lambda: training[0].load(directory, training[1]),
                "verifies": lambda: _verify(directory),
            }
            processes = [
                context.Process(target=_repeat, args=(kind, work, done[kind], is_unfinished, queue))
                for kind, work in workers.items()
            ]
            for process in processes:
                process.start()
            results = dict(queue.get() for _ in processes)
            for process in processes:
                process.join()
        for kind, errors in results.items():
            for error in errors[:_MAX_ERRORS_SHOWN]:
                print(f"    {kind}: {error}")
            count = done[kind].value
            yield Line((kind, f"{count:,}", str(len(errors))), len(errors), 0, at_least=False)

    return Table(f"concurrent saves, loads and verifications, keep={keep}", ("", "number", "failures"), lines())


def _repeat(kind: str, work: Callable[[], object], done: Any, is_unfinished: Callable[[], bool], queue: Any) -> None:
    errors = []
    while is_unfinished():
        try:
            work()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        done.value += 1
    queue.put((kind, errors))
    os._exit(0)


def _training() -> tuple[Any, torch.optim.Optimizer]:
    x = torch.randn(4, 8)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    plan = penstock.plan(
        model, (x,), ranks=2, microbatches=2, schedule="gpipe", loss_fn=functional.mse_loss, budget_seconds=0
    )
    pipe = penstock.Pipeline(model, plan, loss_fn=functional.mse_loss, local=True)
    return pipe, torch.optim.Adam(pipe.parameters())


def _save(training: tuple[Any, torch.optim.Optimizer], directory: Path, keep: int) -> None:
    pipe, optimizer = training
    # Every third save uses the number of the step before, so that it replaces a checkpoint.
    _save.count = getattr(_save, "count", 0) + 1  # type: ignore[attr-defined]
    pipe.save(directory, optimizer, keep=keep, step=_save.count - _save.count // 3)  # type: ignore[attr-defined]


def _verify(directory: Path) -> None:
    _verify.count = getattr(_verify, "count", 0) + 1  # type: ignore[attr-defined]
    # Commands take longer than saves and loads, so `ls` and `show` run every twentieth time only.
    for verb in ("verify", "ls", "show") if _verify.count % 20 == 0 else ("verify",):  # type: ignore[attr-defined]
        result = CliRunner().invoke(app, ["ckpt", verb, str(directory)])
        if result.exit_code or "missing" in result.output or "removed" in result.output:
            raise RuntimeError(f"ckpt {verb} exits with {result.exit_code}: {result.output[-500:]}")
