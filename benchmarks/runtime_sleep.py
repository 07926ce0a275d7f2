"""runtime_sleep: measured against simulated steps, and the CPU cost of the runtime, beside torch's.

Passes sleep, so that more ranks than cores overlap. Both runtimes drive the same stages in the same order, by turns.
penstock runs twice: with messages in shared memory, and over gloo, as torch does. The same passes also run alone on
every rank, without any message: what they take then no runtime can save. So CPU times are compared beyond theirs, and
very short passes are simulated as long as they were alone. Where a bare loop over isend and irecv knows the schedule,
it runs as well: it shows what of the CPU time over gloo is that of the messages. Steps of many seconds are measured for
their length only, as their CPU time per pass is that of the shorter ones.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from benchmarks.bare import BareLoop
from benchmarks.interleaved import Runs, Step, Turn, joined, load, take_turns
from benchmarks.sleeping import SIZE, SleepingBlock, costs, without_sleep
from benchmarks.table import Line, Table
from benchmarks.torch_pipeline import TorchPipeline

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv")
_SHARES = {"penstock": 0.5, "gloo": 0.9}
"""CPU time beyond that of the passes, against torch's"""
_WARM_UP = 3
"""steps before those that are measured; in the first few the runtime decides and checks more"""
_OVER_BARE = 1.25
"""CPU time over gloo, against that of a loop that checks nothing"""


class Setting(NamedTuple):
    """Ranks, microbatches, seconds of a pass, and how far above its simulation a step may be.

    `limit` counts against the simulation with passes that take just what they sleep, or, for passes so short that
    sleeping takes longer than was asked for, against that with passes as long as alone.
    """

    ranks: int
    microbatches: int
    unit: float
    limit: float
    times: int = 5
    is_as_alone: bool = False
    has_cpu: bool = True
    """whether CPU time is measured as well, which takes steps over gloo, of the bare loop and of passes alone"""


class Found(NamedTuple):
    """What one schedule brought: the schedule, the length of a pass, and the steps of all that took turns."""

    schedule: penstock.Schedule
    unit: float
    steps: dict[str, list[Step]]

    @property
    def simulated(self) -> float:
        """Seconds of the step, if passes took just what they sleep."""
        return self._simulated(self.unit)

    @property
    def simulated_as_alone(self) -> float:
        """Seconds of the step, if passes took what they took alone."""
        sleeps = 3 * self.schedule.num_stages * self.schedule.num_microbatches / self.schedule.num_ranks
        return self._simulated(self.seconds("alone") / sleeps)

    def _simulated(self, unit: float) -> float:
        return penstock.simulate(self.schedule, costs(self.schedule.num_stages, unit)).makespan

    def seconds(self, who: str) -> float:
        """The shortest step."""
        return min(step.seconds for step in self.steps[who])

    def cpu(self, who: str) -> float:
        """The least CPU seconds per pass."""
        return min(step.cpu for step in self.steps[who]) / sum(map(len, self.schedule.orders))


LARGE, SMALL = Setting(8, 16, 0.080, 1.01, times=2, has_cpu=False), Setting(4, 16, 0.020, 1.02)
TINY = Setting(4, 16, 0.002, 1.15, is_as_alone=True)


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about sleeping stages."""
    return (sleeping(SMALL), sleeping(TINY), sleeping(LARGE), recording(SMALL))


def sleeping(setting: Setting, names: tuple[str, ...] = SCHEDULES) -> Table:
    """Measured against simulated, against torch, and CPU time per pass against torch's."""

    def lines() -> Iterator[Line]:
        for name in names:
            found = measured(name, setting)
            yield from _seconds(name, found, setting)
            if setting.has_cpu:
                yield from _cpu(name, found)

    columns = ("schedule", "simulated", "ours", "torch", "load", "against", "ratio")
    title = f"sleeping stages, {setting.ranks} ranks, {setting.microbatches} microbatches, {setting.unit * 1e3:g} ms"
    what = ", and CPU time per pass beyond sleeping" if setting.has_cpu else ""
    return Table(f"{title}; least of {setting.times} steps{what}", columns, lines())


def _seconds(name: str, found: Found, setting: Setting) -> Iterator[Line]:
    ours, theirs = found.seconds("penstock"), found.seconds("torch")
    against = "as alone" if setting.is_as_alone else "simulated"
    simulated = found.simulated_as_alone if setting.is_as_alone else found.simulated
    cells = (name, f"{simulated:.3f}", f"{ours:.3f}", f"{theirs:.3f}", load(), against)
    yield _line(cells, ours / simulated, setting.limit)
    yield _line((name, "", f"{ours:.3f}", f"{theirs:.3f}", load(), "torch"), ours / theirs, 1.0)


def _cpu(name: str, found: Found) -> Iterator[Line]:
    alone, theirs = found.cpu("alone"), found.cpu("torch")
    for who, share in _SHARES.items():
        ours, beyond = found.cpu(who), theirs - alone
        cells = (name, "", f"{ours * 1e6:.0f} us", f"{theirs * 1e6:.0f} us", load())
        against = f"CPU, {'shared' if who == 'penstock' else who}"
        yield _line((*cells, against), (ours - alone) / beyond, share)
    if "bare" in found.steps:
        ours, bare = found.cpu("gloo"), found.cpu("bare")
        cells = (name, "", f"{ours * 1e6:.0f} us", f"{bare * 1e6:.0f} us", load(), "bare loop's")
        yield _line(cells, ours / bare, _OVER_BARE)


def recording(setting: Setting, names: tuple[str, ...] = ("1f1b", "zbv")) -> Table:
    """A step with record=True against one without."""

    def lines() -> Iterator[Line]:
        for name in names:
            found = measured(name, setting, _with_and_without_record)
            plain, recorded = found.seconds("penstock"), found.seconds("recorded")
            yield _line((name, f"{plain:.4f}", f"{recorded:.4f}", load()), recorded / plain, 1.01)

    columns = ("schedule", "plain", "recorded", "load", "ratio")
    return Table(f"record=True, seconds per step; least of {setting.times} steps", columns, lines())


def measured(name: str, setting: Setting, of_rank: Callable[..., Any] | None = None) -> Found:
    """Both runtimes on one schedule."""
    schedule = penstock.schedule(name, setting.ranks, setting.microbatches)
    model = nn.Sequential(*(SleepingBlock(setting.unit) for _ in range(schedule.num_stages)))
    plan = penstock.plan(
        model,
        (_batch(setting),),
        ranks=setting.ranks,
        microbatches=setting.microbatches,
        schedule=schedule,
        partitioner=[[str(stage)] for stage in range(schedule.num_stages)],
        speed=penstock.DeviceSpeed(1e12, 1e12),  # nothing needs to be measured: only the order is used
    )
    ranks = penstock.launch(of_rank or _beside_torch, setting.ranks, name, plan, model, setting)
    return Found(schedule, setting.unit, joined(ranks, ("penstock", "gloo", "recorded")))


def _beside_torch(name: str, plan: penstock.Plan, model: nn.Sequential, setting: Setting) -> dict[str, list[Turn]]:
    batch, rank = _batch(setting), torch.distributed.get_rank()
    ours = penstock.Pipeline(model, plan, loss_fn=_loss)
    parts = {stage: model[stage] for stage in plan.schedule.placement.stages[rank]}
    theirs = TorchPipeline.in_order(name, plan.schedule, parts, _loss)
    runs: dict[str, Callable[[], object]] = {
        "penstock": lambda: ours.step(batch, target=batch),
        "torch": lambda: theirs.step(batch, target=batch),
    }
    if setting.has_cpu:
        # A group of its own: pipelines of one group synchronise in the same way.
        mesh = DeviceMesh.from_group(torch.distributed.new_group(), "cpu", mesh_dim_names=("pp",))
        with mock.patch.dict(os.environ, PENSTOCK_WATCH="0"):  # one thread watches for both
            options = penstock.RunOptions(transport="distributed")
            gloo = penstock.Pipeline(model, plan, loss_fn=_loss, mesh=mesh, options=options)
        runs["gloo"] = lambda: gloo.step(batch, target=batch)
        runs["alone"] = lambda: _alone(parts, batch)
        if BareLoop.can_run(plan.schedule):
            bare = BareLoop(plan.schedule, model[rank], _loss)
            runs["bare"] = lambda: bare.step(batch)
    return _measured_turns(runs, setting.times)


def _measured_turns(runs: Runs, times: int) -> dict[str, list[Turn]]:
    with without_sleep():
        take_turns(runs, 0, _WARM_UP)
    return take_turns(runs, times, warm_up=0)


def _alone(parts: dict[int, nn.Module], batch: Tensor) -> None:
    """All passes of one rank, each stage on values of its own."""
    for sample in batch.split(1):
        for stage, part in parts.items():
            made = part(sample.clone().requires_grad_(stage > 0))
            torch.autograd.backward(made, torch.ones_like(made))


def _with_and_without_record(
    name: str, plan: penstock.Plan, model: nn.Sequential, setting: Setting
) -> dict[str, list[Turn]]:
    batch, ours = _batch(setting), penstock.Pipeline(model, plan, loss_fn=_loss)
    runs: dict[str, Callable[[], object]] = {
        "penstock": lambda: ours.step(batch, target=batch),
        "recorded": lambda: ours.step(batch, target=batch, record=True),
    }
    return _measured_turns(runs, setting.times)


def _batch(setting: Setting) -> Tensor:
    return torch.ones(setting.microbatches, SIZE)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def _line(cells: tuple[str, ...], value: float, limit: float) -> Line:
    return Line((*cells, f"{value:.4f}"), value, limit, at_least=False)
