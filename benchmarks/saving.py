"""Time that training loses to a synchronous and to an asynchronous checkpoint."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import penstock
from benchmarks.table import Line, Table
from penstock.ir import Plan


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about checkpoints."""
    return (lost(),)


def lost(width: int = 768, layers: int = 8, steps: int = 10, turns: int = 3) -> Table:
    """Milliseconds that a save costs, next to those of a step; Adam, two ranks, medians."""

    def lines() -> Iterator[Line]:
        model = _model(width, layers)
        x = torch.ones(8, width)
        plan = penstock.plan(
            model, (x,), ranks=2, microbatches=2, schedule="1f1b", loss_fn=nn.functional.mse_loss, budget_seconds=0.0
        )
        with tempfile.TemporaryDirectory() as root:
            found, *_ = penstock.launch(_measured, 2, plan, (width, layers), steps, turns, root)
            size = sum(path.stat().st_size for path in next(Path(root).glob("step-*")).iterdir())
        waiting, beside, behind, step = found
        cells = (f"{size / 2**20:.0f} MiB", *(f"{1e3 * value:.1f}" for value in (step, waiting, beside, behind)))
        yield Line((*cells, f"{beside / waiting:.2f}"), beside / waiting, 0.9, at_least=False)

    columns = ("", "step", "synchronous", "in the call", "with steps", "ratio")
    return Table(
        "time lost per save, milliseconds: the call, and the call with all steps while it writes", columns, lines()
    )


def _model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _measured(
    plan: Plan, sizes: tuple[int, int], steps: int, turns: int, root: str
) -> tuple[float, float, float, float]:
    """Seconds of a synchronous save, of an asynchronous call, of the call and its slower steps, and of a step."""
    pipe = penstock.Pipeline(_model(*sizes), plan, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    x = torch.ones(8, sizes[0])

    def train() -> float:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            pipe.step(x, target=x)
            optimizer.step()
        return time.perf_counter() - began

    def save(asynchronous: bool) -> float:
        began = time.perf_counter()
        pipe.save(root, optimizer, keep=1, asynchronous=asynchronous)
        return time.perf_counter() - began

    train()
    rows = []
    for _ in range(turns):
        plain, waiting, beside, later = train(), save(False), save(True), train()
        pipe.wait_for_save()
        rows.append((waiting, beside, max(0.0, beside + later - plain), plain / steps))
    waiting, beside, behind, step = (statistics.median(column) for column in zip(*rows, strict=True))
    return waiting, beside, behind, step
