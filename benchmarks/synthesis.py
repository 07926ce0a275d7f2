"""synthesis: makespans of synthesised schedules, compared with optima, lower bounds and named schedules.

The exact solver starts from the synthesised schedule and looks for a shorter one. If it does not finish in time, the
shortest schedule that it found is the best known.
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
"""bytes per ten tokens and channels that a layer of the paper's models keeps: 34 + 5 heads x tokens / channels until
its input gradient, and 32 until its weight gradient; the smallest model has more heads per channel than the others"""
_SMALLEST = (8, 2e4)
"""identify the smallest model: its ranks, and an upper limit of its forwards in microseconds"""
GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "zero_bubble_table.csv"


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    ours = (certified(), optimal(), near_the_bound(), large(), against_named())
    return (*ours, published()) if GOLDEN.exists() else ours


def certified(count: int = 500, limit_seconds: float = 60.0) -> Table:
    """Counts the instances whose lower bound is above the proven optimum, which must be none."""

    def lines() -> Iterator[Line]:
        for ranks in (2, 3):
            solved, wrong, tight = 0, 0, 0
            for instance in instances(count // 2, seed=ranks, most_ranks=ranks, microbatches=(1, 5)):
                bound = lower_bound(instance.problem).seconds
                proof = _prove(
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
    return Table("lower bound compared with proven optima", columns, lines())


def optimal(count: int = 100, budget_seconds: float = 10.0, limit_seconds: float = 60.0) -> Table:
    """Small instances: share of schedules that are as good as the best known, and the largest ratio to it."""

    def lines() -> Iterator[Line]:
        ratios, unproven = [], 0
        for instance in instances(count, seed=7):
            made = synthesise(instance.problem, budget_seconds=budget_seconds, may_prove=False)
            if made.gap <= 1e-7:
                ratios.append(1.0)
                continue
            proof = _prove(instance.problem, made, made.bound.seconds, limit_seconds)
            unproven += not proof.is_optimal
            ratios.append(made.seconds / proof.seconds)
            if ratios[-1] > 1 + 1e-9 or not proof.is_optimal:
                print(f"    {instance}: {made.seconds:g}, solver {proof.seconds:g}, proven {proof.bound:g}", flush=True)
        met = sum(ratio <= 1 + 1e-9 for ratio in ratios)
        cells = (str(count), str(met), str(unproven))
        yield Line(("best known", *cells, f"{met / count:.2f}"), met / count, 0.95)
        yield Line(("worst", *cells, f"{max(ratios):.4f}"), max(ratios), 1.01, at_least=False)

    columns = ("", "instances", "met", "unproven", "value")
    return Table("synthesised schedules compared with the exact solver, small problems", columns, lines())


def near_the_bound(ranks: int = 8, microbatches: int = 32, budget_seconds: float = 8.0) -> Table:
    """Larger problems with the memory of 1f1b: makespan divided by the lower bound, and CPU seconds."""

    def lines() -> Iterator[Line]:
        for stages, shape, target in ((1, "loop", 1.03), (2, "vee", 1.03), (2, "loop", 1.05)):
            for kind in KINDS:
                problem = Instance(ranks, microbatches, stages, shape, kind, ranks, 0, seed=1).problem
                begin = process_time()
                made = synthesise(problem, budget_seconds=budget_seconds)
                cpu = process_time() - begin
                values = (f"{made.seconds:g}", f"{made.bound.seconds:g}", f"{cpu:.1f}", f"{1 + made.gap:.4f}")
                yield Line((f"{shape} x {stages}", kind, *values), 1 + made.gap, target, at_least=False)
                yield Line(
                    (f"{shape} x {stages}", "CPU seconds", *values[:2], "", values[2]), cpu, 10.0, at_least=False
                )

    title = f"synthesised schedules / lower bound, {ranks} ranks, {microbatches} microbatches, memory of 1f1b"
    return Table(title, ("placement", "costs", "seconds", "bound", "CPU s", "ratio"), lines())


def large(ranks: int = 64, microbatches: int = 1024, budget_seconds: float = 10.0) -> Table:
    """CPU seconds of problems for which the budget suffices for named schedules and one greedy run only."""

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
    """Named schedules divided by synthesised ones with the same memory; layers and a heavy head on balanced ranks."""

    def lines() -> Iterator[Line]:
        for name, target in (("zbv", 1.03), ("interleaved_zb", 1.10), ("interleaved", 1.20)):
            for layers, head in ((32, 4), (48, 6)):
                placement = build(name, ranks, microbatches, 2).placement
                costs = _balanced_costs(placement, layers, head)
                trace = simulate(lower(build(name, ranks, microbatches, 2)), costs, Cluster(ranks))
                peaks = tuple(int(trace.peak_bytes(rank)) for rank in range(ranks))
                problem = ScheduleProblem.of(costs, placement, microbatches, Cluster(ranks, memory=peaks))
                made = synthesise(problem, budget_seconds=budget_seconds)
                ratio = trace.makespan / made.seconds
                values = (f"{trace.makespan:g}", f"{made.seconds:g}", f"{made.bound.seconds:g}", f"{ratio:.3f}")
                yield Line((name, f"{layers} + {head}", *values), ratio, target)

    columns = ("schedule", "layers", "named", "synthesised", "bound", "ratio")
    title = f"named / synthesised schedules, uneven stages, {ranks} balanced ranks, {microbatches} microbatches"
    return Table(title, columns, lines())


def published(budget_seconds: float = 10.0) -> Table:
    """Bubble rates compared with those of the zero-bubble paper's search, with twice the memory of 1f1b."""

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
                values = (row["rate_zb_h2"], row["rate_zb_2p"], f"{max(least, 0.0):.4f}", f"{rate:.4f}")
                target = float(row["rate_zb_2p"])
                yield Line((f"{ranks} x {microbatches}", *values), round(rate, 4), target, at_least=False)

    columns = ("ranks x m", "zb_h2", "zb_2p", "bound", "ours")
    return Table("bubble rates compared with the zero-bubble paper's search", columns, lines())


def _prove(problem: ScheduleProblem, made: Synthesis, bound: float, limit_seconds: float) -> Proof:
    return prove(problem, rank_orders(made.best.schedule), bound, limit_seconds)


def _balanced_costs(placement: Placement, layers: int, head: int) -> StageCosts:
    """Costs of equal layers and a head as long as several, cut so that ranks are balanced; one byte per layer."""
    graph, profile = chain([1.0] * layers + [float(head)])
    division = divide("linear", Problem(graph, profile, Cluster(placement.num_ranks), placement))
    work = tuple(sum(profile[name].forward for name in stage) for stage in division.partition.stages)
    sizes = tuple(map(len, division.partition.stages))
    return StageCosts(work, work, work, activation_bytes=sizes)
