"""asynchronous: steps with and without a flush between them, measured against simulated.

Passes sleep, so that more ranks than cores overlap. The same plan trains the same batches both ways, interleaved. A
stream of batches ends with a drain, and is simulated as one order.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import penstock
from benchmarks.interleaved import Turn, joined, load, take_turns
from benchmarks.sleeping import SIZE, SleepingBlock, costs
from benchmarks.table import Line, Table

STALENESS = ("stash", "2bw", "predict")
_LIMIT = 1.06
"""measured over simulated"""


class Setting(NamedTuple):
    """Ranks, microbatches per batch, batches, and seconds of a pass."""

    ranks: int = 4
    microbatches: int = 4
    batches: int = 5
    unit: float = 0.080
    times: int = 2


def tables(setting: Setting = Setting()) -> tuple[Table, ...]:  # noqa: B008
    """Everything that `make bench` shows about asynchronous pipelines."""
    return (without_flushes(setting),)


def without_flushes(setting: Setting) -> Table:
    """Seconds of some batches with flushes, and without them in every mode."""

    def lines() -> Iterator[Line]:
        model = nn.Sequential(*(SleepingBlock(setting.unit) for _ in range(setting.ranks)))
        plan = penstock.plan(
            model,
            (_batch(setting),),
            ranks=setting.ranks,
            microbatches=setting.microbatches,
            schedule="1f1b",
            partitioner=[[str(stage)] for stage in range(setting.ranks)],
        )
        seconds = costs(setting.ranks, setting.unit)
        flushed = setting.batches * penstock.simulate(plan, seconds).makespan
        work = setting.batches * setting.microbatches * 3 * setting.unit
        for staleness in STALENESS:
            ranks = penstock.launch(_of_rank, setting.ranks, plan, model, setting, staleness)
            steps = joined(ranks, ("flushed", staleness))
            stream = penstock.simulate(plan, seconds, staleness=staleness, batches=setting.batches).makespan
            measured = {name: min(step.seconds for step in steps[name]) for name in steps}
            for name, simulated in (("flushed", flushed), (staleness, stream)):
                bubbles = (f"{1 - work / simulated:.1%}", f"{1 - work / measured[name]:.1%}")
                cells = (name, f"{simulated:.3f}", f"{measured[name]:.3f}", *bubbles, load(), "simulated")
                yield _line(cells, measured[name] / simulated, _LIMIT)
            cells = (staleness, f"{stream:.3f}", f"{measured[staleness]:.3f}", "", "", load(), "flushed")
            yield _line(cells, measured[staleness] / measured["flushed"], _LIMIT * stream / flushed)

    columns = ("steps", "simulated", "measured", "bubble", "measured", "load", "against", "ratio")
    title = f"{setting.batches} batches of {setting.microbatches} microbatches on {setting.ranks} ranks"
    return Table(f"{title}, {setting.unit * 1e3:g} ms per pass; least of {setting.times}", columns, lines())


def _of_rank(plan: penstock.Plan, model: nn.Sequential, setting: Setting, staleness: str) -> dict[str, list[Turn]]:
    batch = _batch(setting)
    flushed = penstock.Pipeline(model, plan, loss_fn=_loss)
    optimizer = torch.optim.SGD(flushed.parameters(), lr=0.01, momentum=0.9)
    stream = penstock.Pipeline(
        model,
        plan,
        loss_fn=_loss,
        staleness=staleness,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    )

    def run_flushed() -> None:
        for _ in range(setting.batches):
            optimizer.zero_grad()
            flushed.step(batch, target=batch)
            optimizer.step()

    def run_stream() -> None:
        for _ in range(setting.batches):
            stream.step(batch, target=batch)
        stream.drain()

    return take_turns({"flushed": run_flushed, staleness: run_stream}, setting.times)


def _batch(setting: Setting) -> Tensor:
    return torch.ones(setting.microbatches, SIZE)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def _line(cells: tuple[str, ...], value: float, limit: float) -> Line:
    return Line((*cells, f"{value:.4f}"), value, limit, at_least=False)
