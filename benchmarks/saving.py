"""Share of the steps' time that training loses to checkpoints."""

import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import penstock
from benchmarks.table import Line, Table
from penstock.demo.gpt import Sizes, batch, gpt, loss
from penstock.ir import Plan

_SHARE = 0.03
"""of the time of steps that asynchronous saves may cost"""


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about checkpoints."""
    return (lost(),)


def lost(sizes: Sizes = Sizes(samples=16, microbatches=8), every: int = 10, turns: int = 3) -> Table:  # noqa: B008
    """What a save adds to the steps until the next one, as a share of their time; Adam, two ranks, medians."""

    def lines() -> Iterator[Line]:
        tokens, _ = batch(sizes)
        plan = penstock.plan(
            gpt(sizes), (tokens,), ranks=2, microbatches=sizes.microbatches, schedule="1f1b", budget_seconds=0.0
        )
        with tempfile.TemporaryDirectory() as root:
            found, *_ = penstock.launch(_measured, 2, plan, sizes, every, turns, root)
            size = sum(path.stat().st_size for path in next(Path(root).glob("step-*")).iterdir())
        synchronous, call, asynchronous, step = found
        for name, seconds, limit in (("synchronous", synchronous, math.inf), ("asynchronous", asynchronous, _SHARE)):
            share = seconds / (every * step)
            figures = (f"{1e3 * value:.1f}" for value in (step, call if name == "asynchronous" else seconds, seconds))
            yield Line((name, f"{size / 2**20:.0f} MiB", *figures, f"{share:.2%}"), share, limit, at_least=False)

    columns = ("save", "size", "step", "in the call", "with steps", "share")
    title = f"a GPT of {sizes.layers} layers, d={sizes.width}: share of the time lost to a save every {every} steps"
    return Table(f"{title}; milliseconds", columns, lines())


def _measured(plan: Plan, sizes: Sizes, steps: int, turns: int, root: str) -> tuple[float, float, float, float]:
    """Seconds of a synchronous save, of an asynchronous call, of the call and its slower steps, and of a step."""
    pipe = penstock.Pipeline(gpt(sizes), plan, loss_fn=loss)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    tokens, wanted = batch(sizes)

    def train() -> float:
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            pipe.step(tokens, target=wanted)
            optimizer.step()
        return time.perf_counter() - began

    def save(asynchronous: bool) -> float:
        began = time.perf_counter()
        pipe.save(root, optimizer, keep=1, asynchronous=asynchronous)
        return time.perf_counter() - began

    train()
    save(True)
    pipe.wait_for_save()
    rows = []
    for _ in range(turns):
        plain, waiting, beside, later = train(), save(False), save(True), train()
        pipe.wait_for_save()
        # Steps vary by more than a save may cost; it costs the time of the call at least.
        rows.append((waiting, beside, max(beside, beside + later - plain), plain / steps))
    waiting, beside, behind, step = (statistics.median(column) for column in zip(*rows, strict=True))
    return waiting, beside, behind, step
