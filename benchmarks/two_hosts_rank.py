"""Script for torchrun on two hosts: compares a plan for measured links with one for free links, and with one process.

`two_hosts_rank.py DIRECTORY TASK` with the task as JSON writes the results of every rank to `DIRECTORY/rankN.json`.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Sizes and options of the comparison."""

    wide: int = 256
    narrow: int = 8
    samples: int = 256
    microbatches: int = 4
    steps: int = 4
    flops: float | None = None
    """operations per second assumed by the plans; None: the model is measured"""
    schedule: str = "auto"
    budget_seconds: float = 3.0
    """search time per plan"""
    dies: bool = False
    """whether the last rank is killed in a further step"""


def build(task: Task) -> nn.Module:
    """Wide layers with a bottleneck behind the middle: the balanced cut is a wide one, a narrow one is near."""
    wide, narrow = task.wide, task.narrow
    before, after = ([nn.Linear(wide, wide) for _ in range(count)] for count in (5, 2))
    model = nn.Sequential(*before, nn.Linear(wide, narrow), nn.Linear(narrow, wide), *after)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.double()


def batches(task: Task) -> Iterator[Batch]:
    """Batches, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    while True:
        x, target = (torch.randn(task.samples, task.wide, generator=generator).double() for _ in range(2))
        yield x, target


def plans(task: Task, model: nn.Module) -> dict[str, penstock.Plan]:
    """The plan for free links, and the plan for the measured ones."""
    x, _ = next(batches(task))
    speed = None if task.flops is None else penstock.DeviceSpeed(task.flops, task.flops)
    wishes: dict[str, Any] = {"microbatches": task.microbatches, "loss_fn": mse_loss, "speed": speed}
    wishes |= {"schedule": task.schedule, "stages_per_rank": 1, "budget_seconds": task.budget_seconds}

    def blind(cluster: penstock.Cluster) -> penstock.Plan:
        return penstock.plan(model, (x,), ranks=penstock.Cluster(cluster.ranks, cores=cluster.cores), **wishes)

    def seeing(cluster: penstock.Cluster) -> penstock.Plan:
        return penstock.plan(model, (x,), ranks=cluster, **wishes)

    return {"without links": penstock.plan_together(blind), "with links": penstock.plan_together(seeing)}


def bytes_between_hosts(plan: penstock.Plan) -> int:
    """Bytes that a step sends between the hosts."""
    host = [rank >= plan.num_ranks // 2 for rank in plan.schedule.placement.ranks]
    crossing = (one for one in plan.costs.messages if host[one.producer] != host[one.consumer])
    return plan.num_microbatches * sum(one.forward_bytes + one.backward_bytes for one in crossing)


def trained(step: Callable[[Tensor, Tensor], Tensor], held: Any, task: Task) -> tuple[list[float], list[float]]:
    """Losses and seconds of the steps of an optimizer; the last gradients are kept."""
    optimizer = torch.optim.SGD(held.parameters(), lr=0.05, momentum=0.9)
    losses, seconds = [], []
    for _, (x, target) in zip(range(task.steps), batches(task), strict=False):
        optimizer.zero_grad()
        began = time.perf_counter()
        losses.append(float(step(x, target)))
        seconds.append(time.perf_counter() - began)
        optimizer.step()
    return losses, seconds


def apart(pipe: penstock.Pipeline, model: nn.Module) -> float:
    """The largest difference of this rank's gradients and weights to those of the unsplit model, over their size."""
    whole = dict(model.named_parameters())
    pairs = [(own.grad, whole[name].grad) for name, own in pipe.named_parameters()]
    pairs += [(own.detach(), whole[name].detach()) for name, own in pipe.named_parameters()]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def beside(task: Task, model: nn.Module, plan: penstock.Plan, cluster: penstock.Cluster) -> dict[str, Any]:
    """Train a plan and the unsplit model; with the prediction for the measured links."""
    unsplit, pipe = deepcopy(model), penstock.Pipeline(deepcopy(model), plan, loss_fn=mse_loss)

    def plain(x: Tensor, target: Tensor) -> Tensor:
        loss = mse_loss(unsplit(x), target)
        loss.backward()
        return loss.detach()

    expected, _ = trained(plain, unsplit, task)
    dist.barrier()
    losses, seconds = trained(lambda x, target: pipe.step(x, target=target).loss, pipe, task)
    return {
        "bytes": bytes_between_hosts(plan),
        "predicted": penstock.simulate(plan, cluster=cluster).makespan,
        "losses": losses,
        "expected": expected,
        "apart": apart(pipe, unsplit),
        "seconds": statistics.median(seconds[1:]),
    }


def last_words(task: Task, model: nn.Module, plan: penstock.Plan) -> str:
    """The error of this rank when the last rank is killed in the middle of a step."""
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss)
    if dist.get_rank() == dist.get_world_size() - 1:
        model[-1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        pipe.step(*next(batches(task))[:1], target=next(batches(task))[1])
    except penstock.RunError as error:
        return str(error)
    return "no error"


def main(directory: Path, task: Task) -> None:
    """Run the comparison as one rank."""
    dist.init_process_group("gloo")
    model = build(task)
    made = plans(task, model)
    cluster = made["with links"].cluster
    found = {name: beside(task, model, plan, cluster) for name, plan in made.items()}
    links = [asdict(link) for link in cluster.links]
    page = directory / f"rank{dist.get_rank()}.json"
    page.write_text(json.dumps({"links": links, "cores": cluster.cores, **found}))
    if task.dies:
        words = last_words(task, model, made["with links"])
        page.with_suffix(".txt").write_text(words)
        sys.exit(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Task(**json.loads(sys.argv[2])))
