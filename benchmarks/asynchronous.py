"""asynchronous: steps with a flush between them and without, each compared with its simulation.

Passes sleep, so that more ranks than cores run in parallel. The same plan trains the same batches with both methods,
interleaved. The steps without a flush end with a drain and are simulated as one order.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import penstock
from benchmarks.sleeping import SIZE, SleepingBlock, costs
from benchmarks.table import Line, Table
from benchmarks.timing import RankTiming, combine_ranks, load_average, run_interleaved

STALENESS = ("stash", "2bw", "predict")
_TARGET = 1.06
"""maximum of measured divided by simulated seconds"""


class Setting(NamedTuple):
    """Sizes of the pipeline."""

    ranks: int = 4
    microbatches: int = 4
    """per batch"""
    batches: int = 5
    unit: float = 0.080
    """seconds of a pass"""
    times: int = 2


def tables(setting: Setting = Setting()) -> tuple[Table, ...]:  # noqa: B008
    """All tables of this benchmark."""
    return (without_flushes(setting),)


def without_flushes(setting: Setting) -> Table:
    """Seconds of all batches with flushes, and without them for every value of `staleness`."""

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
            ranks = penstock.launch(_run_rank, setting.ranks, plan, model, setting, staleness)
            steps = combine_ranks(ranks, ("flushed", staleness))
            stream = penstock.simulate(plan, seconds, staleness=staleness, batches=setting.batches).makespan
            measured = {name: min(step.seconds for step in steps[name]) for name in steps}
            for name, simulated in (("flushed", flushed), (staleness, stream)):
                bubbles = (f"{1 - work / simulated:.1%}", f"{1 - work / measured[name]:.1%}")
                cells = (name, f"{simulated:.3f}", f"{measured[name]:.3f}", *bubbles, load_average(), "simulated")
                yield _line(cells, measured[name] / simulated, _TARGET)
            cells = (staleness, f"{stream:.3f}", f"{measured[staleness]:.3f}", "", "", load_average(), "flushed")
            yield _line(cells, measured[staleness] / measured["flushed"], _TARGET * stream / flushed)

    columns = ("steps", "simulated", "measured", "bubble", "measured", "load", "against", "ratio")
    title = f"{setting.batches} batches of {setting.microbatches} microbatches on {setting.ranks} ranks"
    return Table(f"{title}, {setting.unit * 1e3:g} ms per pass; seconds, minimum of {setting.times}", columns, lines())


def _run_rank(
    plan: penstock.Plan, model: nn.Sequential, setting: Setting, staleness: str
) -> dict[str, list[RankTiming]]:
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

    return run_interleaved({"flushed": run_flushed, staleness: run_stream}, setting.times)


def _batch(setting: Setting) -> Tensor:
    return torch.ones(setting.microbatches, SIZE)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def _line(cells: tuple[str, ...], value: float, target: float) -> Line:
    return Line((*cells, f"{value:.4f}"), value, target, at_least=False)
