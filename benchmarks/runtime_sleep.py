"""runtime_sleep: duration and CPU time of a step, compared with the simulation and with torch's runtime.

Every pass sleeps for a fixed time, so more ranks than cores run in parallel and the durations of passes are known. What
a step takes beyond its simulation is overhead of the runtime. Measured, interleaved on the same ranks:

- penstock with messages in shared memory
- penstock over gloo ("gloo")
- torch.distributed.pipelining over gloo, with the same stages in the same order ("torch")
- the passes of each rank without any message ("alone"). A sleep takes longer than requested, by about 0.1 ms and more
  on a busy machine. No runtime can avoid that, so the step is also compared with a simulation whose passes take as long
  as they took alone. For 2 ms passes that comparison has the target. Cores that halt would add more, so they are kept
  awake.
- for one stage per rank with full backwards, a minimal loop over isend and irecv ("bare"), whose CPU time is that of
  the messages

CPU time is per pass. In ratios to torch, that of "alone" is subtracted from both. It is not measured for 80 ms passes,
which would take minutes: it does not depend on how long a pass sleeps.
"""

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from benchmarks.bare import BareLoop
from benchmarks.sleeping import SIZE, SleepingBlock, costs, with_awake_cores, without_sleep
from benchmarks.table import Line, Table
from benchmarks.timing import Calls, RankTiming, StepTiming, combine_ranks, load_average, run_interleaved
from benchmarks.torch_pipeline import TorchPipeline

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv")
_CPU_TARGETS = {"penstock": 0.5, "gloo": 0.9}
"""CPU time of the runtime as a share of that of torch's"""
_BARE_TARGET = 1.25
"""CPU time over gloo divided by that of the minimal loop"""
_RECORD_TARGET = 1.01
_WARMUP = 3
"""steps that are not measured; the first ones compile the program and check it"""


class Setting(NamedTuple):
    """Sizes of a pipeline, and the target of its step."""

    ranks: int
    microbatches: int
    unit: float
    """seconds that a forward, an input gradient and a weight gradient sleep each"""
    target: float
    """maximum of the measured step divided by the simulated one"""
    times: int = 5
    is_target_alone: bool = False
    """whether the target is for the simulation with passes as long as they took alone"""
    has_cpu: bool = True
    """whether the steps for CPU time run as well: over gloo, and the minimal loop"""


class Measurement(NamedTuple):
    """The steps of all runtimes with one schedule."""

    schedule: penstock.Schedule
    unit: float
    steps: dict[str, list[StepTiming]]

    @property
    def simulated(self) -> float:
        """Seconds of the simulated step if passes take exactly as long as they sleep."""
        return self._simulate(self.unit)

    @property
    def simulated_as_alone(self) -> float:
        """Seconds of the simulated step if passes take as long as they took alone."""
        sleeps = 3 * self.schedule.num_stages * self.schedule.num_microbatches / self.schedule.num_ranks
        return self._simulate(self.seconds("alone") / sleeps)

    def _simulate(self, unit: float) -> float:
        return penstock.simulate(self.schedule, costs(self.schedule.num_stages, unit)).makespan

    def seconds(self, runtime: str) -> float:
        """Seconds of the shortest step."""
        return min(step.seconds for step in self.steps[runtime])

    def cpu(self, runtime: str) -> float:
        """CPU seconds per pass of the step with the least of them."""
        return min(step.cpu for step in self.steps[runtime]) / sum(map(len, self.schedule.orders))


LARGE, SMALL = Setting(8, 16, 0.080, 1.01, times=2, has_cpu=False), Setting(4, 16, 0.020, 1.02)
TINY = Setting(4, 16, 0.002, 1.15, times=15, is_target_alone=True)


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (sleeping(SMALL), sleeping(TINY), sleeping(LARGE), recording(SMALL))


def sleeping(setting: Setting, names: tuple[str, ...] = SCHEDULES) -> Table:
    """Step time against the simulation and against torch, and CPU time per pass against torch."""

    def lines() -> Iterator[Line]:
        for name in names:
            measurement = measure(name, setting)
            yield from _step_lines(name, measurement, setting)
            if setting.has_cpu:
                yield from _cpu_lines(name, measurement)

    columns = ("schedule", "simulated", "ours", "torch", "load", "against", "ratio")
    title = f"sleeping stages, {setting.ranks} ranks, {setting.microbatches} microbatches, {setting.unit * 1e3:g} ms"
    cpu = "; CPU time per pass" if setting.has_cpu else ""
    return Table(
        f"{title} per pass; seconds per step, minimum of {setting.times}{cpu}", columns, with_awake_cores(lines())
    )


def _step_lines(name: str, measurement: Measurement, setting: Setting) -> Iterator[Line]:
    ours, theirs = measurement.seconds("penstock"), measurement.seconds("torch")
    measured = (f"{ours:.3f}", f"{theirs:.3f}", load_average())
    if not setting.is_target_alone:
        simulated = measurement.simulated
        yield _line((name, f"{simulated:.3f}", *measured, "simulated"), ours / simulated, setting.target)
    simulated = measurement.simulated_as_alone
    target = setting.target if setting.is_target_alone else math.inf
    yield _line((name, f"{simulated:.3f}", *measured, "as alone"), ours / simulated, target)
    yield _line((name, "", *measured, "torch"), ours / theirs, 1.0)


def _cpu_lines(name: str, measurement: Measurement) -> Iterator[Line]:
    alone, theirs = measurement.cpu("alone"), measurement.cpu("torch")
    for runtime, target in _CPU_TARGETS.items():
        ours = measurement.cpu(runtime)
        cells = (name, "", f"{ours * 1e6:.0f} us", f"{theirs * 1e6:.0f} us", load_average())
        against = f"CPU, {'shared' if runtime == 'penstock' else runtime}"
        yield _line((*cells, against), (ours - alone) / (theirs - alone), target)
    if "bare" in measurement.steps:
        ours, bare = measurement.cpu("gloo"), measurement.cpu("bare")
        cells = (name, "", f"{ours * 1e6:.0f} us", f"{bare * 1e6:.0f} us", load_average(), "bare loop")
        yield _line(cells, ours / bare, _BARE_TARGET)


def recording(setting: Setting, names: tuple[str, ...] = ("1f1b", "zbv")) -> Table:
    """The step with record=True against the step without."""

    def lines() -> Iterator[Line]:
        for name in names:
            measurement = measure(name, setting, _run_with_and_without_record)
            plain, recorded = measurement.seconds("penstock"), measurement.seconds("recorded")
            yield _line((name, f"{plain:.4f}", f"{recorded:.4f}", load_average()), recorded / plain, _RECORD_TARGET)

    columns = ("schedule", "plain", "recorded", "load", "ratio")
    title = f"sleeping stages with record=True; seconds per step, minimum of {setting.times}"
    return Table(title, columns, with_awake_cores(lines()))


def measure(name: str, setting: Setting, run_rank: Callable[..., Any] | None = None) -> Measurement:
    """Measures one schedule; `run_rank` runs on every rank, by default all runtimes."""
    schedule = penstock.schedule(name, setting.ranks, setting.microbatches)
    model = nn.Sequential(*(SleepingBlock(setting.unit) for _ in range(schedule.num_stages)))
    plan = penstock.plan(
        model,
        (_batch(setting),),
        ranks=setting.ranks,
        microbatches=setting.microbatches,
        schedule=schedule,
        partitioner=[[str(stage)] for stage in range(schedule.num_stages)],
        speed=penstock.DeviceSpeed(1e12, 1e12),  # not measured, because the plan is given
    )
    ranks = penstock.launch(run_rank or _run_all, setting.ranks, name, plan, model, setting)
    return Measurement(schedule, setting.unit, combine_ranks(ranks, ("penstock", "gloo", "recorded")))


def _run_all(name: str, plan: penstock.Plan, model: nn.Sequential, setting: Setting) -> dict[str, list[RankTiming]]:
    batch, rank = _batch(setting), torch.distributed.get_rank()
    ours = penstock.Pipeline(model, plan, loss_fn=_loss)
    parts = {stage: model[stage] for stage in plan.schedule.placement.stages[rank]}
    theirs = TorchPipeline.in_order(name, plan.schedule, parts, _loss)
    calls: dict[str, Callable[[], object]] = {
        "penstock": lambda: ours.step(batch, target=batch),
        "torch": lambda: theirs.step(batch, target=batch),
        "alone": lambda: _run_alone(parts, batch),
    }
    if setting.has_cpu:
        # The pipeline needs its own process group, because pipelines of one group synchronise with each other.
        mesh = DeviceMesh.from_group(torch.distributed.new_group(), "cpu", mesh_dim_names=("pp",))
        with mock.patch.dict(os.environ, PENSTOCK_WATCH="0"):  # one monitor thread is enough for both pipelines
            options = penstock.RunOptions(transport="distributed")
            gloo = penstock.Pipeline(model, plan, loss_fn=_loss, mesh=mesh, options=options)
        calls["gloo"] = lambda: gloo.step(batch, target=batch)
        if BareLoop.can_run(plan.schedule):
            bare = BareLoop(plan.schedule, model[rank], _loss)
            calls["bare"] = lambda: bare.step(batch)
    return _run_warm(calls, setting.times)


def _run_warm(calls: Calls, times: int) -> dict[str, list[RankTiming]]:
    with without_sleep():
        run_interleaved(calls, 0, _WARMUP)
    return run_interleaved(calls, times, warmup=0)


def _run_alone(parts: dict[int, nn.Module], batch: Tensor) -> None:
    """Runs all passes of this rank without messages: each stage gets the batch instead of received values."""
    for sample in batch.split(1):
        for stage, part in parts.items():
            output = part(sample.clone().requires_grad_(stage > 0))
            torch.autograd.backward(output, torch.ones_like(output))


def _run_with_and_without_record(
    name: str, plan: penstock.Plan, model: nn.Sequential, setting: Setting
) -> dict[str, list[RankTiming]]:
    batch, ours = _batch(setting), penstock.Pipeline(model, plan, loss_fn=_loss)
    calls: dict[str, Callable[[], object]] = {
        "penstock": lambda: ours.step(batch, target=batch),
        "recorded": lambda: ours.step(batch, target=batch, record=True),
    }
    return _run_warm(calls, setting.times)


def _batch(setting: Setting) -> Tensor:
    return torch.ones(setting.microbatches, SIZE)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def _line(cells: tuple[str, ...], value: float, target: float) -> Line:
    return Line((*cells, f"{value:.4f}"), value, target, at_least=False)
