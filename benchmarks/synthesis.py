"""How good synthesised orders are: against the optimum, a bound, and named schedules.

The solver starts every problem from scratch. Where it does not finish in time, nothing is claimed: the order then
counts as optimal only if it meets the bound.
"""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import process_time

from benchmarks.graphs import chain
from benchmarks.instances import KINDS, Instance, instances
from benchmarks.table import Line, Table
from penstock.ir import Cluster, Placement, StageCosts
from penstock.partitioners import Problem, divide
from penstock.passes import lower
from penstock.planner import ScheduleProblem, synthesise
from penstock.planner.synthesis import Synthesis, lower_bound
from penstock.planner.synthesis.exact import Proof, prove
from penstock.planner.synthesis.problem import rank_orders
from penstock.schedules import build
from penstock.simulate import simulate

_KEPT, _KEPT_BY_SMALLEST, _LATE = 740, 873, 320
"""bytes that a layer of the paper's models keeps, per ten tokens and channels: 34 + 5 heads x tokens / channels until
its input gradient, 32 until its weight gradient; the smallest model has more heads for its width than the others"""
_SMALLEST = (8, 2e4)
"""the ranks of the smallest model, and microseconds that its forwards do not reach"""
GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "zero_bubble_table.csv"


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about synthesised orders; published results only if they are there."""
    ours = (certified(), optimal(), near_the_bound(), large(), against_named())
    return (*ours, published()) if GOLDEN.exists() else ours


def certified(count: int = 500, limit_seconds: float = 60.0) -> Table:
    """How often the bound is above the optimum of instances that the solver solves without knowing the bound."""

    def lines() -> Iterator[Line]:
        for ranks in (2, 3):
            solved, wrong, tight = 0, 0, 0
            for instance in instances(count // 2, seed=ranks, most_ranks=ranks, microbatches=(1, 5)):
                bound = lower_bound(instance.problem).seconds
                proof = _proof(
                    instance.problem,
                    synthesise(instance.problem, budget_seconds=0.2, may_prove=False),
                    0.0,
                    limit_seconds,
                )
                solved += proof.is_optimal
                wrong += proof.is_optimal and bound > proof.seconds * (1 + 1e-9)
                tight += proof.is_optimal and bound >= proof.seconds * (1 - 1e-6)
            cells = (f"up to {ranks} ranks", str(count // 2), str(solved), str(tight), str(wrong))
            yield Line(cells, wrong, 0, at_least=False)

    columns = ("", "instances", "solved", "bound met", "violated")
    return Table("the lower bound against proven optima", columns, lines())


def optimal(count: int = 100, budget_seconds: float = 10.0, limit_seconds: float = 60.0) -> Table:
    """Small instances at the memory of 1f1b and below: how often orders are proven optima, and how far others are."""

    def lines() -> Iterator[Line]:
        ratios, unproven = [], 0
        for instance in instances(count, seed=7):
            made = synthesise(instance.problem, budget_seconds=budget_seconds, may_prove=False)
            if made.gap <= 1e-7:
                ratios.append(1.0)
                continue
            proof = _proof(instance.problem, made, made.bound.seconds, limit_seconds)
            unproven += not proof.is_optimal
            ratios.append(made.seconds / proof.seconds)
            if ratios[-1] > 1 + 1e-9 or not proof.is_optimal:
                print(f"    {instance}: {made.seconds:g}, solver {proof.seconds:g}, proven {proof.bound:g}", flush=True)
        met = sum(ratio <= 1 + 1e-9 for ratio in ratios)
        cells = (str(count), str(met), str(unproven))
        yield Line(("best known", *cells, f"{met / count:.2f}"), met / count, 0.95)
        yield Line(("worst", *cells, f"{max(ratios):.4f}"), max(ratios), 1.01, at_least=False)

    return Table("small problems against the solver", ("", "instances", "met", "unproven", "figure"), lines())


def near_the_bound(ranks: int = 8, microbatches: int = 32, budget_seconds: float = 8.0) -> Table:
    """Larger problems at the memory of 1f1b."""

    def lines() -> Iterator[Line]:
        for stages, shape, target in ((1, "loop", 1.03), (2, "vee", 1.03), (2, "loop", 1.05)):
            for kind in KINDS:
                problem = Instance(ranks, microbatches, stages, shape, kind, ranks, 0, seed=1).problem
                begin = process_time()
                made = synthesise(problem, budget_seconds=budget_seconds)
                cpu = process_time() - begin
                figures = (f"{made.seconds:g}", f"{made.bound.seconds:g}", f"{cpu:.1f}", f"{1 + made.gap:.4f}")
                yield Line((f"{shape} x {stages}", kind, *figures), 1 + made.gap, target, at_least=False)
                yield Line(
                    (f"{shape} x {stages}", "CPU seconds", *figures[:2], "", figures[2]), cpu, 10.0, at_least=False
                )

    title = f"{ranks} ranks, {microbatches} microbatches, memory of 1f1b"
    return Table(title, ("placement", "costs", "seconds", "bound", "CPU s", "ratio"), lines())


def large(ranks: int = 64, microbatches: int = 1024, budget_seconds: float = 10.0) -> Table:
    """Problems so large that only the schedules of the table and one greedy run are affordable."""

    def lines() -> Iterator[Line]:
        for kind in ("balanced", "random"):
            problem = Instance(ranks, microbatches, 1, "loop", kind, ranks, 0, seed=1).problem
            begin = process_time()
            made = synthesise(problem, budget_seconds=budget_seconds)
            cpu = process_time() - begin
            cells = (kind, f"{made.seconds:g}", f"{made.bound.seconds:g}", f"{1 + made.gap:.4f}", f"{cpu:.1f}")
            yield Line(cells, cpu, budget_seconds, at_least=False)

    title = f"synthesis for {ranks} ranks, {microbatches} microbatches, CPU seconds"
    return Table(title, ("costs", "seconds", "bound", "ratio", "CPU s"), lines())


def against_named(ranks: int = 8, microbatches: int = 32, budget_seconds: float = 8.0) -> Table:
    """Layers and a heavy head, cut so that ranks are even: named schedules over what is made at their memory."""

    def lines() -> Iterator[Line]:
        for name, target in (("zbv", 1.03), ("interleaved_zb", 1.10), ("interleaved", 1.20)):
            for layers, head in ((32, 4), (48, 6)):
                placement = build(name, ranks, microbatches, 2).placement
                costs = _even(placement, layers, head)
                trace = simulate(lower(build(name, ranks, microbatches, 2)), costs, Cluster(ranks))
                peaks = tuple(int(trace.peak_bytes(rank)) for rank in range(ranks))
                problem = ScheduleProblem.of(costs, placement, microbatches, Cluster(ranks, memory=peaks))
                made = synthesise(problem, budget_seconds=budget_seconds)
                ratio = trace.makespan / made.seconds
                figures = (f"{trace.makespan:g}", f"{made.seconds:g}", f"{made.bound.seconds:g}", f"{ratio:.3f}")
                yield Line((name, f"{layers} + {head}", *figures), ratio, target)

    columns = ("schedule", "layers", "named", "made", "bound", "ratio")
    return Table(f"uneven stages, even ranks: {ranks} ranks, {microbatches} microbatches", columns, lines())


def published(budget_seconds: float = 10.0) -> Table:
    """Bubble rates of the zero-bubble paper's search with twice the memory of 1f1b; ours must not be larger."""

    def lines() -> Iterator[Line]:
        with GOLDEN.open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                ranks, microbatches = int(row["p"]), int(row["m"])
                passes = tuple((float(row[f"{name}_us"]),) * ranks for name in ("F", "I", "W"))
                is_smallest = ranks == _SMALLEST[0] and passes[0][0] < _SMALLEST[1]
                kept = _KEPT_BY_SMALLEST if is_smallest else _KEPT
                costs = StageCosts(*passes, activation_bytes=(kept,) * ranks, weight_grad_bytes=(_LATE,) * ranks)
                cluster = Cluster(ranks, memory=2 * ranks * kept, latency=float(row["comm_us"]))
                problem = ScheduleProblem.of(costs, Placement.loop(ranks), microbatches, cluster)
                problem = replace(problem, objective="span")
                made = synthesise(problem, budget_seconds=budget_seconds * (1 if ranks < 32 else 4))
                work = microbatches * sum(each[0] for each in passes)
                rate, least = 1 - work / made.seconds, 1 - work / made.bound.seconds
                figures = (row["rate_zb_h2"], row["rate_zb_2p"], f"{max(least, 0.0):.4f}", f"{rate:.4f}")
                target = float(row["rate_zb_2p"])
                yield Line((f"{ranks} x {microbatches}", *figures), round(rate, 4), target, at_least=False)

    columns = ("ranks x m", "zb_h2", "zb_2p", "bound", "ours")
    return Table("bubble rates against the zero-bubble paper's search", columns, lines())


def _proof(problem: ScheduleProblem, made: Synthesis, bound: float, limit_seconds: float) -> Proof:
    return prove(problem, rank_orders(made.best.schedule), bound, limit_seconds)


def _even(placement: Placement, layers: int, head: int) -> StageCosts:
    """Equal layers and a head worth several of them, cut so that the sums of ranks are even; a byte per layer."""
    graph, profile = chain([1.0] * layers + [float(head)])
    division = divide("linear", Problem(graph, profile, Cluster(placement.num_ranks), placement))
    work = tuple(sum(profile[name].forward for name in stage) for stage in division.partition.stages)
    sizes = tuple(map(len, division.partition.stages))
    return StageCosts(work, work, work, activation_bytes=sizes)
