"""overlap: steps of two replicas, on two hosts joined by a 200 Mbit/s link, compared with their simulation.

The gradients of a stage are averaged over the replicas from its last backward on, in parallel with the passes of other
stages. Passes sleep, so the number of cores does not matter. Columns:

- compute: simulated step without replicas
- link: measured time to average all gradients without any pass, which gives the bandwidth of the simulation
- simulated: simulated step with both

torchrun runs this file as `overlap.py DIRECTORY TASKS`; every rank writes its results to `DIRECTORY/rankN.json`.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock
from benchmarks.hosts import NoHostsError, run_on_hosts
from benchmarks.sleeping import SIZE, PacedBlock, with_awake_cores
from benchmarks.table import Line, Table
from penstock.ir import Schedule, StageCosts, StateBytes

RANKS = 2
"""pipeline ranks on each host"""


@dataclass(frozen=True)
class Task:
    """A setting of the benchmark."""

    name: str
    schedule: str = "looped_bfs"
    stages_per_rank: int = 8
    microbatches: int = 4
    unit: float = 0.02
    """seconds of a forward; a backward takes twice as long"""
    stage_bytes: int = 1 << 20
    """bytes of the parameters of a stage"""
    is_sharded: bool = False
    """whether `fully_shard` shards every stage over the replicas"""
    steps: int = 3

    def build_schedule(self) -> Schedule:
        """The schedule of one replica."""
        options = {} if self.stages_per_rank == 1 else {"stages_per_rank": self.stages_per_rank}
        return penstock.schedule(self.schedule, RANKS, self.microbatches, **options)

    @property
    def costs(self) -> StageCosts:
        """Seconds and bytes of every stage."""
        stages = RANKS * self.stages_per_rank
        units = (self.unit,) * stages
        return StageCosts(units, units, units, state=(StateBytes(self.stage_bytes, self.stage_bytes),) * stages)


TASKS = (
    Task("compute", stage_bytes=600_000),
    Task("both", stage_bytes=3_000_000),
    Task("link", microbatches=2, unit=0.008, stage_bytes=8_000_000),
    Task("1f1b", "1f1b", stages_per_rank=1, microbatches=8, unit=0.04, stage_bytes=4_000_000),
    Task("interleaved", "interleaved", stages_per_rank=4, microbatches=8, stage_bytes=600_000),
)
_DOMINATED = ("compute", "link", "interleaved")
"""settings in which compute or communication hides the other, except for that of the first or last stage"""
_TARGET = 1.05
_TIMEOUT_SECONDS = 180.0


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (replicas(),)


def replicas(tasks: Sequence[Task] = TASKS) -> Table:
    """The measured step compared with the simulated one, and with the longer of compute and communication."""

    def lines() -> Iterator[Line]:
        try:
            ranks = run_on_hosts(Path(__file__), RANKS, [asdict(task) for task in tasks], _TIMEOUT_SECONDS)
        except NoHostsError as reason:
            yield Line((f"not measured: {reason}", *[""] * 6), 0.0, 0.0)
            return
        for task in tasks:
            found = [rank[task.name] for rank in ranks]
            program = penstock.lower(task.build_schedule())
            compute = penstock.simulate(program, task.costs).makespan
            link = max(rank["alone"] for rank in found)
            bandwidth = task.stages_per_rank * task.stage_bytes / link
            cluster = penstock.Cluster(RANKS, replicas=penstock.Replicas(2, bandwidth=bandwidth))
            simulated = penstock.simulate(program, task.costs, cluster).makespan
            step = median(max(steps) for steps in zip(*(rank["steps"] for rank in found), strict=True))
            seconds = (f"{value:.3f}" for value in (compute, link, simulated, step))
            cells = (task.name, *seconds)
            yield Line((*cells, "simulated", f"{step / simulated:.3f}"), step / simulated, _TARGET, at_least=False)
            if task.name in _DOMINATED:
                ratio = step / max(compute, link)
                yield Line((task.name, *[""] * 4, "longer", f"{ratio:.3f}"), ratio, _TARGET, at_least=False)

    columns = ("setting", "compute", "link", "simulated", "measured", "against", "ratio")
    return Table("two replicas over 200 Mbit/s, seconds per step; median", columns, with_awake_cores(lines()))


def measure_steps(task: Task, mesh: DeviceMesh) -> list[float]:
    """Measures the seconds of each step on this rank."""
    schedule = task.build_schedule()
    model = nn.Sequential(*(PacedBlock(task.unit, task.stage_bytes // 4) for _ in range(schedule.num_stages)))
    batch = torch.ones(task.microbatches, SIZE)
    plan = penstock.plan(
        model,
        (batch,),
        microbatches=task.microbatches,
        schedule=schedule,
        partitioner=[[str(stage)] for stage in range(schedule.num_stages)],
        speed=penstock.DeviceSpeed(1e12, 1e12),  # not measured, because the plan is given
        mesh=mesh,
    )

    def shard(stage: nn.Module, mesh: DeviceMesh) -> None:
        fully_shard(stage, mesh=mesh["dp"])

    pipe = penstock.Pipeline(
        model, plan, loss_fn=nn.functional.mse_loss, mesh=mesh, parallelize_fn=shard if task.is_sharded else None
    )
    return list(_steps(pipe, batch, task.steps))


def _steps(pipe: penstock.Pipeline, batch: Tensor, steps: int) -> Iterator[float]:
    for number in range(1 + steps):
        for parameter in pipe.parameters():
            parameter.grad = None
        dist.barrier()
        start = time.perf_counter()
        pipe.step(batch, target=batch)
        if number:  # the first step compiles
            yield time.perf_counter() - start


def measure_reduction(task: Task, group: Any) -> float:
    """Measures the seconds to average the gradients of all stages without passes, on all ranks at once."""
    tensors = [torch.zeros(task.stage_bytes // 4) for _ in range(task.stages_per_rank)]
    seconds = []
    for _ in range(task.steps):
        dist.barrier()
        start = time.perf_counter()
        for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
            work.wait()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def main(directory: Path, tasks: list[Task]) -> None:
    """Measures all tasks on this rank."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("dp", "pp"))
    found = {
        task.name: {"alone": measure_reduction(task, mesh.get_group("dp")), "steps": measure_steps(task, mesh)}
        for task in tasks
    }
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Task(**task) for task in json.loads(sys.argv[2])])
