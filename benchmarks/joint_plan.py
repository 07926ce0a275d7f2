"""joint_plan: quality of searched plans, and time and memory of planning large models and clusters."""

import resource
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks.capture import llama
from benchmarks.table import Line, Table
from penstock.ir import Cluster, Graph, Node, NodeBytes, NodeCost, Plan, Profile, Replicas, TensorSpec, Value
from penstock.planner import Measured, PlanOptions, search

_VALUE, _WEIGHT = TensorSpec((4, 1024), requires_grad=True), TensorSpec((1024, 1024), requires_grad=True)
_GIGABYTE = 1e9


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (heavy_head(), without_weights(), large())


def layers(seconds: list[float]) -> Measured:
    """A chain of layers whose forward, input gradient and weight gradient take the given seconds each."""
    names = [f"layers.{index}" for index in range(len(seconds))]
    nodes = tuple(
        Node(name, (read,), (Value(name, _VALUE),), (f"{name}.weight",), module=name, kind="Linear", is_block=True)
        for name, read in zip(names, ["x", *names], strict=False)
    )
    weights = tuple(Value(f"{name}.weight", _WEIGHT) for name in names)
    graph = Graph(nodes, (Value("x", TensorSpec((4, 1024))),), (names[-1],), weights)
    memory = NodeBytes(kept=2 * _VALUE.bytes, kept_for_weight_grad=_VALUE.bytes)
    costs = tuple(NodeCost(name, each, 2 * each, each, each, memory) for name, each in zip(names, seconds, strict=True))
    return Measured(graph, Profile(costs, 3 * sum(seconds), graph.fingerprint, "synthetic"))


def heavy_head(
    count: int = 32, head: float = 4.0, ranks: int = 8, microbatches: int = 32, budget_seconds: float = 10.0
) -> Table:
    """Equal layers and a head as long as several: predicted step divided by the work per rank if it were balanced."""

    def lines() -> Iterator[Line]:
        model = layers([1.0] * count + [head])
        ideal = 3 * (count + head) * microbatches / ranks
        equal = [
            [f"layers.{rank * count // ranks + layer}" for layer in range(count // ranks)] for rank in range(ranks)
        ]
        equal[-1].append(f"layers.{count}")
        requests = {
            "equal layers, 1f1b": (PlanOptions(ranks, schedule="1f1b", partitioner=equal), 2.0),
            "linear, 1f1b": (PlanOptions(ranks, schedule="1f1b", partitioner="linear"), 1.5),
            "auto": (PlanOptions(ranks, budget_seconds=budget_seconds), 1.2),
        }
        for name, (options, target) in requests.items():
            plan = search({microbatches: model}, options)
            ratio, bound = plan.predicted.makespan / ideal, plan.lower_bound / ideal
            cells = (name, plan.choices.schedule, plan.choices.placement, f"{bound:.3f}", f"{ratio:.3f}")
            yield Line(cells, ratio, target, at_least=False)

    columns = ("plan", "schedule", "placement", "bound", "step")
    title = f"{count} layers and a head worth {head:g}, {ranks} ranks, {microbatches} microbatches"
    return Table(f"{title}: step divided by a balanced share of the work", columns, lines())


def without_weights() -> Table:
    """Seconds and peak memory of planning eight billion parameters on the meta device, in a new process."""

    def lines() -> Iterator[Line]:
        run = [sys.executable, "-m", "benchmarks.joint_plan"]
        done = subprocess.run(run, capture_output=True, text=True, check=True)
        seconds, gigabytes, step, peak = map(float, done.stdout.split()[-4:])
        cells = (f"step {step:.2f} s", f"{peak:.0f} GB per rank")
        yield Line(("8 billion, time", *cells, f"{seconds:.1f} s"), seconds, 10.0, at_least=False)
        yield Line(("8 billion, peak", *cells, f"{gigabytes:.2f} GB"), gigabytes, 2.0, at_least=False)

    return Table("plan of Llama-3 8B for 8 ranks, without weights", ("model", "predicted", "peak", ""), lines())


def large() -> Table:
    """Seconds to plan for large clusters."""

    def lines() -> Iterator[Line]:
        deep, wide = layers([1e-3] * 256), layers([1e-3] * 64 + [4e-3])
        ring = Replicas(125, latency=1e-5, bandwidth=1e10)
        link = {"memory": "80GiB", "latency": 1e-5, "bandwidth": 2e10}
        fixed = {"schedule": "interleaved", "partitioner": "linear", "stages_per_rank": 2}
        requests = {
            "64 x 1,024": (deep, 1024, PlanOptions(Cluster(64, **link), **fixed)),
            "64 x 1,024 auto": (deep, 1024, PlanOptions(Cluster(64, **link), stages_per_rank=2)),
            "8 x 125 dp": (wide, 32, PlanOptions(Cluster(8, **link, replicas=ring))),
        }
        for name, (model, count, options) in requests.items():
            start = time.perf_counter()
            plan = search({count: model}, options)
            seconds = time.perf_counter() - start
            cells = (name, str(plan.num_stages), str(_ranks(plan)), f"{plan.predicted.makespan:.3f} s")
            cells += (f"{max(plan.predicted.peaks) / _GIGABYTE:.2f} GB", f"{seconds:.1f} s")
            yield Line(cells, seconds, 60.0, at_least=False)

    columns = ("plan", "stages", "ranks", "step", "peak", "planning")
    return Table("planning for large clusters", columns, lines())


def _ranks(plan: Plan) -> int:
    return plan.num_ranks * plan.cluster.replicas.count


def _plan_eight_billion() -> None:
    """Prints seconds of planning, peak gigabytes of this process, and predicted step and peak."""
    import torch

    import penstock

    with torch.device("meta"):
        sizes = {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        model = llama(32, 4096, **sizes)
    tokens = torch.zeros(32, 2048, dtype=torch.long, device="meta")
    speed = penstock.DeviceSpeed(3e14, 2e12)
    start = time.perf_counter()
    given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    plan = penstock.plan(model, (), given, ranks=8, microbatches=32, speed=speed)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIGABYTE
    print(seconds, peak, plan.predicted.makespan, max(plan.predicted.peaks) / _GIGABYTE)


if __name__ == "__main__":
    _plan_eight_billion()
