"""Script for torchrun on two hosts: steps of two replicas of a pipeline, one on each host.

`overlap_rank.py DIRECTORY TASKS` with the tasks as JSON writes the results of every rank to `DIRECTORY/rankN.json`.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock
from benchmarks.sleeping import SIZE, PacedBlock
from penstock.ir import Schedule, StageCosts, StateBytes

RANKS = 2
"""pipeline ranks on each host"""


@dataclass(frozen=True)
class Task:
    """One pipeline with two replicas."""

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


def measured(task: Task, mesh: DeviceMesh) -> list[float]:
    """Seconds of each step on this rank."""
    schedule = task.build_schedule()
    model = nn.Sequential(*(PacedBlock(task.unit, task.stage_bytes // 4) for _ in range(schedule.num_stages)))
    batch = torch.ones(task.microbatches, SIZE)
    plan = penstock.plan(
        model,
        (batch,),
        microbatches=task.microbatches,
        schedule=schedule,
        partitioner=[[str(stage)] for stage in range(schedule.num_stages)],
        speed=penstock.DeviceSpeed(1e12, 1e12),  # nothing is measured: the schedule is given
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
        began = time.perf_counter()
        pipe.step(batch, target=batch)
        if number:  # the first step compiles
            yield time.perf_counter() - began


def alone(task: Task, group: Any) -> float:
    """Seconds in which replicas average the gradients of all stages with no passes, on all ranks at once."""
    tensors = [torch.zeros(task.stage_bytes // 4) for _ in range(task.stages_per_rank)]
    seconds = []
    for _ in range(task.steps):
        dist.barrier()
        began = time.perf_counter()
        for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
            work.wait()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def main(directory: Path, tasks: list[Task]) -> None:
    """Run all tasks as one rank."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("dp", "pp"))
    found = {task.name: {"alone": alone(task, mesh.get_group("dp")), "steps": measured(task, mesh)} for task in tasks}
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Task(**task) for task in json.loads(sys.argv[2])])
