"""saving: share of the training time that is lost to checkpoints, saved synchronously and asynchronously."""

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

_TARGET = 0.03
"""maximum share of the training time that asynchronous saves may take"""


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (lost(),)


def lost(sizes: Sizes = Sizes(samples=16, microbatches=8), every: int = 10, rounds: int = 7) -> Table:  # noqa: B008
    """Time that a save adds to the steps until the next save, as a share of their time; Adam, two ranks, medians."""

    def lines() -> Iterator[Line]:
        tokens, _ = batch(sizes)
        plan = penstock.plan(
            gpt(sizes), (tokens,), ranks=2, microbatches=sizes.microbatches, schedule="1f1b", budget_seconds=0.0
        )
        with tempfile.TemporaryDirectory() as root:
            found, *_ = penstock.launch(_measure, 2, plan, sizes, every, rounds, root)
            size = sum(path.stat().st_size for path in next(Path(root).glob("step-*")).iterdir())
        synchronous, call, asynchronous, step = found
        for name, seconds, target in (("synchronous", synchronous, math.inf), ("asynchronous", asynchronous, _TARGET)):
            share = seconds / (every * step)
            times = (f"{1e3 * value:.1f}" for value in (step, call if name == "asynchronous" else seconds, seconds))
            yield Line((name, f"{size / 2**20:.0f} MiB", *times, f"{share:.2%}"), share, target, at_least=False)

    columns = ("save", "size", "step", "call", "call + steps", "share")
    title = f"time lost to a save every {every} steps, GPT with {sizes.layers} layers, d={sizes.width}; milliseconds"
    return Table(title, columns, lines())


def _measure(plan: Plan, sizes: Sizes, steps: int, rounds: int, root: str) -> tuple[float, float, float, float]:
    """Returns seconds of a synchronous save, an asynchronous call, that call with the slowdown of steps, and a step."""
    pipe = penstock.Pipeline(gpt(sizes), plan, loss_fn=loss)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=1e-3)
    tokens, target = batch(sizes)

    def train() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            pipe.step(tokens, target=target)
            optimizer.step()
        return time.perf_counter() - start

    def save(asynchronous: bool) -> float:
        start = time.perf_counter()
        pipe.save(root, optimizer, keep=1, asynchronous=asynchronous)
        return time.perf_counter() - start

    train()
    save(True)
    pipe.wait_for_save()
    rows = []
    before = train()
    for _ in range(rounds):
        synchronous, call, during = save(False), save(True), train()
        pipe.wait_for_save()
        after = train()
        # The speed of the machine drifts by more than the target, so the steps beside a save are compared with the mean
        # of those before and after it. The call is the least that a save can cost.
        plain = (before + after) / 2
        rows.append((synchronous, call, max(call, call + during - plain), plain / steps))
        before = after
    synchronous, call, asynchronous, step = (statistics.median(column) for column in zip(*rows, strict=True))
    return synchronous, call, asynchronous, step
