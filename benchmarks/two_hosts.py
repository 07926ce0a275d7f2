"""two_hosts: gain of a plan for measured links, on two hosts joined by a 200 Mbit/s link.

The model has wide layers and a bottleneck near its middle. A plan for free links cuts a wide layer for balance; a plan
for the measured links should cut at the bottleneck. Both are trained and compared with the unsplit model.

torchrun runs this file as `two_hosts.py DIRECTORY TASK`; every rank writes its results to `DIRECTORY/rankN.json`.
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
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from benchmarks.hosts import NoHostsError, run_on_hosts
from benchmarks.table import Line, Table

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Sizes and options of one run."""

    wide: int = 256
    narrow: int = 8
    samples: int = 256
    microbatches: int = 4
    steps: int = 4
    flops: float | None = None
    """operations per second that the plans assume; None: the model is measured"""
    schedule: str = "auto"
    budget_seconds: float = 3.0
    """seconds of search per plan"""
    kills_last_rank: bool = False
    """whether the last rank is killed in an additional step"""


TASK = Task(wide=64, narrow=4, samples=8192, steps=12)
RANKS = 2
"""ranks on each host"""
_TIMEOUT_SECONDS = 240.0
Results = dict[str, Any]


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return links(), gains()


def links(task: Task = TASK, ranks: int = RANKS) -> Table:
    """Measured bandwidth and latency between the hosts and inside a host."""

    def lines(found: Results) -> Iterator[Line]:
        for name, is_slow in (("two hosts", True), ("one host", False)):
            own = [link for link in found["links"] if ((link["source"] < ranks) != (link["target"] < ranks)) is is_slow]
            if own:
                rate = 8e-6 * statistics.median(link["bandwidth"] for link in own)
                delay = 1e6 * statistics.median(link["latency"] for link in own)
                yield Line((name, f"{rate:,.0f}", f"{delay:,.0f}"), rate, 210.0 if is_slow else 1000.0, not is_slow)

    return Table("measured links between ranks on", ("", "Mbit/s", "us latency"), _lines(task, ranks, lines, 3))


def gains(task: Task = TASK, ranks: int = RANKS) -> Table:
    """The plan for free links compared with the plan for the measured ones: bytes, predicted and measured step."""

    def lines(found: Results) -> Iterator[Line]:
        free, linked = found["without links"], found["with links"]
        for name, key, unit, target in (
            ("KiB between hosts", "bytes", 1 / 1024, 4.0),
            ("ms predicted", "predicted", 1e3, 1.2),
            ("ms measured", "seconds", 1e3, 1.2),
        ):
            ratio = free[key] / linked[key]
            yield Line((name, f"{unit * free[key]:,.1f}", f"{unit * linked[key]:,.1f}", f"{ratio:.2f}"), ratio, target)
        errors = f"{free['error']:.1e}", f"{linked['error']:.1e}"
        yield Line(("error", *errors, ""), max(free["error"], linked["error"]), 1e-12, at_least=False)

    title = f"step on two hosts, {ranks} ranks each; error is the difference to the unsplit model"
    return Table(title, ("", "without links", "with links", "ratio"), _lines(task, ranks, lines, 4))


def _lines(task: Task, ranks: int, lines: Callable[[Results], Iterator[Line]], columns: int) -> Iterator[Line]:
    try:
        yield from lines(measured(task, ranks))
    except NoHostsError as reason:
        yield Line((f"not measured: {reason}", *[""] * (columns - 1)), 0.0, 0.0)


@cache
def measured(task: Task, ranks: int) -> Results:
    """Runs the task; returns the results of the first rank, with the largest seconds and error of all ranks."""
    found = run_on_hosts(Path(__file__), ranks, asdict(task), _TIMEOUT_SECONDS)
    for plan in ("without links", "with links"):
        for key in ("seconds", "error"):
            found[0][plan][key] = max(one[plan][key] for one in found)
    return found[0]


def build(task: Task) -> nn.Module:
    """Wide layers with a bottleneck after the middle: the balanced cut has many bytes, and one near it has few."""
    wide, narrow = task.wide, task.narrow
    before, after = ([nn.Linear(wide, wide) for _ in range(count)] for count in (5, 2))
    model = nn.Sequential(*before, nn.Linear(wide, narrow), nn.Linear(narrow, wide), *after)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.double()


def batches(task: Task) -> Iterator[Batch]:
    """Yields random batches, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    while True:
        x, target = (torch.randn(task.samples, task.wide, generator=generator).double() for _ in range(2))
        yield x, target


def plans(task: Task, model: nn.Module) -> dict[str, penstock.Plan]:
    """Makes the plan for free links and the plan for the measured ones."""
    x, _ = next(batches(task))
    speed = None if task.flops is None else penstock.DeviceSpeed(task.flops, task.flops)
    options: dict[str, Any] = {"microbatches": task.microbatches, "loss_fn": mse_loss, "speed": speed}
    options |= {"schedule": task.schedule, "stages_per_rank": 1, "budget_seconds": task.budget_seconds}

    def plan_free(cluster: penstock.Cluster) -> penstock.Plan:
        return penstock.plan(model, (x,), ranks=penstock.Cluster(cluster.ranks, cores=cluster.cores), **options)

    def plan_linked(cluster: penstock.Cluster) -> penstock.Plan:
        return penstock.plan(model, (x,), ranks=cluster, **options)

    return {"without links": penstock.plan_together(plan_free), "with links": penstock.plan_together(plan_linked)}


def bytes_between_hosts(plan: penstock.Plan) -> int:
    """Bytes that a step sends between the hosts."""
    host = [rank >= plan.num_ranks // 2 for rank in plan.schedule.placement.ranks]
    crossing = (one for one in plan.costs.messages if host[one.producer] != host[one.consumer])
    return plan.num_microbatches * sum(one.forward_bytes + one.backward_bytes for one in crossing)


def train(step: Callable[[Tensor, Tensor], Tensor], held: Any, task: Task) -> tuple[list[float], list[float]]:
    """Trains; returns losses and seconds of all steps, and keeps the gradients of the last one."""
    optimizer = torch.optim.SGD(held.parameters(), lr=0.05, momentum=0.9)
    losses, seconds = [], []
    for _, (x, target) in zip(range(task.steps), batches(task), strict=False):
        optimizer.zero_grad()
        start = time.perf_counter()
        losses.append(float(step(x, target)))
        seconds.append(time.perf_counter() - start)
        optimizer.step()
    return losses, seconds


def max_error(pipe: penstock.Pipeline, model: nn.Module) -> float:
    """The largest relative difference of this rank's gradients and weights to those of the unsplit model."""
    whole = dict(model.named_parameters())
    pairs = [(own.grad, whole[name].grad) for name, own in pipe.named_parameters()]
    pairs += [(own.detach(), whole[name].detach()) for name, own in pipe.named_parameters()]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def compare(task: Task, model: nn.Module, plan: penstock.Plan, cluster: penstock.Cluster) -> dict[str, Any]:
    """Trains a plan and the unsplit model; returns their results, and the prediction for the measured links."""
    unsplit, pipe = deepcopy(model), penstock.Pipeline(deepcopy(model), plan, loss_fn=mse_loss)

    def plain(x: Tensor, target: Tensor) -> Tensor:
        loss = mse_loss(unsplit(x), target)
        loss.backward()
        return loss.detach()

    expected, _ = train(plain, unsplit, task)
    dist.barrier()
    losses, seconds = train(lambda x, target: pipe.step(x, target=target).loss, pipe, task)
    return {
        "bytes": bytes_between_hosts(plan),
        "predicted": penstock.simulate(plan, cluster=cluster).makespan,
        "losses": losses,
        "expected": expected,
        "error": max_error(pipe, unsplit),
        "seconds": statistics.median(seconds[1:]),
    }


def error_of_killed_peer(task: Task, model: nn.Module, plan: penstock.Plan) -> str:
    """Kills the last rank during a step; returns the error message of this rank."""
    pipe = penstock.Pipeline(model, plan, loss_fn=mse_loss)
    if dist.get_rank() == dist.get_world_size() - 1:
        model[-1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        pipe.step(*next(batches(task))[:1], target=next(batches(task))[1])
    except penstock.RunError as error:
        return str(error)
    return "no error"


def main(directory: Path, task: Task) -> None:
    """Runs the task on this rank."""
    dist.init_process_group("gloo")
    model = build(task)
    made = plans(task, model)
    cluster = made["with links"].cluster
    found = {name: compare(task, model, plan, cluster) for name, plan in made.items()}
    links = [asdict(link) for link in cluster.links]
    file = directory / f"rank{dist.get_rank()}.json"
    file.write_text(json.dumps({"links": links, "cores": cluster.cores, **found}))
    if task.kills_last_rank:
        message = error_of_killed_peer(task, model, made["with links"])
        file.with_suffix(".txt").write_text(message)
        sys.exit(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Task(**json.loads(sys.argv[2])))
