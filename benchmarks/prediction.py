"""prediction: predicted against measured time and memory of a step, and the gain of "auto".

Models are measured, planned and run as a user would do it. Passes of sleeping blocks sleep, so that more ranks than
cores overlap.
"""

import math
import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from benchmarks.sleeping import SIZE, SleepingBlock, with_awake_cores
from benchmarks.table import Line, Table
from benchmarks.timing import combine_ranks, load_average, run_interleaved
from benchmarks.torch_pipeline import NAMES, TorchPipeline
from penstock.demo.gpt import Sizes, batch, gpt, loss
from penstock.launch import num_cores
from penstock.schedules import SCHEDULES

_SEED = 20
_UNITS = (1, 2, 5, 10, 20)
"""milliseconds that the passes of the longest block of a model take"""
_PLAN_SECONDS = 4.0
_SLEEPING_ERROR, _COMPUTING_ERROR, _SHARED_ERROR = 0.03, 0.05, 0.20
_OVER_1F1B, _OVER_BEST = 1.4, 1.08


class Sleeper(NamedTuple):
    """A random model of sleeping blocks and how it is to be planned."""

    units: tuple[float, ...]
    ranks: int
    microbatches: int
    schedule: str

    def model(self) -> nn.Sequential:
        """The blocks, one after the other."""
        return nn.Sequential(*(SleepingBlock(unit) for unit in self.units))


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about predictions."""
    return (sleeping(), computing(), sharing(), against_torch())


def sleeping(count: int = 20, times: int = 7) -> Table:
    """The predicted step of random plans against the measured one."""

    def lines() -> Iterator[Line]:
        runs = []
        for sleeper in _sleepers(count):
            data = torch.ones(sleeper.microbatches, SIZE)
            plan = penstock.plan(
                sleeper.model(),
                (data,),
                ranks=sleeper.ranks,
                microbatches=sleeper.microbatches,
                schedule=sleeper.schedule,
                budget_seconds=_PLAN_SECONDS,
            )
            name = f"{sleeper.schedule} {sleeper.ranks}x{sleeper.microbatches}"
            runs.append(Run(name, plan, sleeper.model, data, data))
        errors = []
        for ranks in sorted({run.plan.num_ranks for run in runs}):
            for line in _compared([run for run in runs if run.plan.num_ranks == ranks], mean_square, times, math.inf):
                errors.append(line.value)
                yield line
        middle = statistics.median(errors)
        yield Line(("median", "", "", load_average(), f"{middle:.2%}"), middle, _SLEEPING_ERROR, at_least=False)

    columns = ("plan", "predicted", "measured", "load", "error")
    return Table(
        f"seconds of a step, sleeping blocks, {count} random plans; least of {times} steps",
        columns,
        with_awake_cores(lines()),
    )


def computing(
    sizes: Sizes = Sizes(),  # noqa: B008
    times: int = 7,
    names: Sequence[str] = (*SCHEDULES, "auto"),
    ranks: int = 2,
    limit: float = _COMPUTING_ERROR,
) -> Table:
    """The predicted step of a small GPT against the measured one."""

    def lines() -> Iterator[Line]:
        model, (tokens, wanted) = gpt(sizes), batch(sizes)
        runs = []
        # Measured now: a virtual machine is not equally fast at all hours, and the user's cache may have a profile of
        # another one.
        with TemporaryDirectory() as cache, mock.patch.dict(os.environ, PENSTOCK_CACHE=cache):
            for name in names:
                plan = penstock.plan(
                    model,
                    (tokens,),
                    ranks=ranks,
                    microbatches=sizes.microbatches,
                    schedule=name,
                    budget_seconds=_PLAN_SECONDS,
                    # The loss runs in the passes of the last stage.
                    loss_fn=loss,
                    target=wanted,
                )
                runs.append(Run(name, plan, lambda: gpt(sizes), tokens, wanted))
        yield from _compared(runs, loss, times, limit)

    columns = ("schedule", "predicted", "measured", "load", "error")
    title = f"seconds of a step, a small GPT, {ranks} ranks on {num_cores()} cores"
    return Table(f"{title}; least of {times} steps", columns, lines())


def sharing(times: int = 7, names: Sequence[str] = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "auto")) -> Table:
    """The same with twice as many ranks as cores."""
    return computing(times=times, names=names, ranks=2 * num_cores(), limit=_SHARED_ERROR)


def against_torch(
    layers: int = 16, head: int = 4, ranks: int = 4, unit: float = 0.01, times: int = 3, budget_seconds: float = 8.0
) -> Table:
    """The plan of "auto" against torch's schedules with as many layers in every stage, run for real."""

    def lines() -> Iterator[Line]:
        model = nn.Sequential(*(SleepingBlock(unit) for _ in range(layers)), SleepingBlock(head * unit))
        microbatches = 4 * ranks
        data = torch.ones(microbatches, SIZE)
        plan = penstock.plan(model, (data,), ranks=ranks, microbatches=microbatches, budget_seconds=budget_seconds)
        found = combine_ranks(penstock.launch(_beside_torch, ranks, plan, model, data, times))
        seconds = {name: min(step.seconds for step in steps) for name, steps in found.items()}
        ours, others = seconds.pop("penstock"), seconds
        for name, theirs in others.items():
            target = _OVER_1F1B if name == "1f1b" else _OVER_BEST
            cells = (name, f"{plan.predicted.makespan:.3f}", f"{ours:.3f}", f"{theirs:.3f}", load_average())
            yield Line((*cells, f"{theirs / ours:.3f}"), theirs / ours, target)

    columns = ("torch's", "predicted", "auto", "torch", "load", "ratio")
    title = f"{layers} sleeping layers and a head worth {head}, {ranks} ranks, seconds of a step"
    return Table(f"{title}; least of {times} steps", columns, with_awake_cores(lines()))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The loss of sleeping blocks."""
    return nn.functional.mse_loss(output, target)


def _sleepers(count: int) -> Iterator[Sleeper]:
    chance = random.Random(_SEED)
    for _ in range(count):
        ranks = chance.choice((2, 3, 4))
        # Models of short passes and of long ones, with blocks that differ by up to a factor of two.
        longest = chance.choice(_UNITS) / 1000
        units = tuple(longest * chance.choice((0.5, 0.75, 1)) for _ in range(chance.randint(3 * ranks, 4 * ranks)))
        names = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "auto")
        yield Sleeper(units, ranks, chance.randint(ranks, 3 * ranks), chance.choice(names))


class Run(NamedTuple):
    """A plan to be run, by a name, on a model that each rank makes."""

    name: str
    plan: penstock.Plan
    model: Callable[[], nn.Module]
    data: Tensor
    target: Tensor


def _compared(runs: Sequence[Run], loss_fn: Any, times: int, limit: float) -> Iterator[Line]:
    """Compare the predicted step of each plan with the minimum of its measured steps; all plans run on the same ranks.

    One plan after another, as users train: the steps of other plans in between would take the caches and the memory of
    the allocator from a plan that holds many microbatches.
    """
    steps = list(combine_ranks(penstock.launch(_steps, runs[0].plan.num_ranks, runs, loss_fn, times)).values())
    for run, taken in zip(runs, steps, strict=True):
        predicted, found = run.plan.predicted.makespan, min(step.seconds for step in taken)
        error = abs(found / predicted - 1)
        cells = (run.name, f"{predicted:.3f}", f"{found:.3f}", load_average(), f"{error:.2%}")
        yield Line(cells, error, limit, at_least=False)


def _steps(runs: Sequence[Run], loss_fn: Any, times: int) -> Any:
    pipes = [penstock.Pipeline(run.model(), run.plan, loss_fn=loss_fn) for run in runs]
    timings: dict[str, Any] = {}
    for number, (pipe, run) in enumerate(zip(pipes, runs, strict=True)):
        step = partial(pipe.step, run.data, target=run.target)
        timings |= run_interleaved({str(number): step}, times, warmup=2)
    return timings


def _beside_torch(plan: penstock.Plan, model: nn.Sequential, data: Tensor, times: int) -> Any:
    pipe = penstock.Pipeline(model, plan, loss_fn=mean_square)
    runs: dict[str, Any] = {"penstock": lambda: pipe.step(data, target=data)}
    for name in NAMES:
        order = penstock.schedule(name, plan.num_ranks, plan.num_microbatches)
        parts = _equal_layers(model, order.num_stages)
        own = {stage: parts[stage] for stage in order.placement.stages[dist.get_rank()]}
        theirs = TorchPipeline.named(name, own, order.num_stages, plan.num_microbatches, mean_square)
        runs[name] = lambda theirs=theirs: theirs.step(data, target=data)
    return run_interleaved(runs, times)


def _equal_layers(model: nn.Sequential, num_stages: int) -> list[nn.Sequential]:
    """The same number of layers in every stage, the head with the last."""
    layers, each = list(model), (len(model) - 1) // num_stages
    bounds = [stage * each for stage in range(num_stages)] + [len(layers)]
    return [nn.Sequential(*layers[bounds[stage] : bounds[stage + 1]]) for stage in range(num_stages)]
