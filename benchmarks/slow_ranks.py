"""slow_ranks: steps until a slow rank is reported, false reports, and the gain of the plan that is advised.

Ranks are processes. Blocks sleep, and those of one rank sleep longer from some step on; or blocks compute, and the
ranks share the cores of this machine.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import penstock
from benchmarks.sleeping import SIZE, SleepingBlock
from benchmarks.table import Line, Table
from benchmarks.timing import load_average
from penstock.demo.gpt import Sizes, gpt, loss
from penstock.ir import Cluster, NodeCost, Plan, Profile
from penstock.launch import num_cores
from penstock.planner import Measured, PlanOptions, SlowRankAdvisor, search

FACTORS = (1.3, 1.5, 2.0, 4.0)
WITHIN = 10
"""maximum number of steps until a rank that takes at least 1.5 times as long is reported"""
COMPUTING = Sizes(layers=8, width=64, vocabulary=64, length=32, samples=16, microbatches=8)


class Setting(NamedTuple):
    """Sizes of a pipeline with four sleeping blocks per rank; `clean` is the number of steps before a rank is slow."""

    ranks: int = 4
    microbatches: int = 8
    unit: float = 0.004
    clean: int = 20

    @property
    def slow_rank(self) -> int:
        """A rank in the middle; the first one makes the reports."""
        return self.ranks // 2

    def slowness(self, factor: float) -> tuple[float, ...]:
        """The slowness of all ranks if the slow rank takes `factor` times as long."""
        return tuple(factor if rank == self.slow_rank else 1.0 for rank in range(self.ranks))


class RankResult(NamedTuple):
    """Seconds of every step on a rank, and the reports of the first rank with their steps."""

    seconds: list[float]
    reports: list[tuple[int, str]]


SLEEPING = Setting()


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (delays(SLEEPING), false_reports(200), replans(SLEEPING))


def delays(setting: Setting, factors: Sequence[float] = FACTORS) -> Table:
    """Steps until a slow rank is reported; there is no target below 1.5 times."""

    def lines() -> Iterator[Line]:
        plan = sleeping_plan(setting, Cluster(setting.ranks))
        for factor in factors:
            result = _launch(plan, setting, setting.clean + 2 * WITHIN, setting.clean, factor)
            steps = [step - setting.clean + 1 for step, _ in result.reports]
            after, shown = (float(steps[0]), str(steps[0])) if steps else (float("inf"), "never")
            target = WITHIN if factor >= 1.5 else float("inf")
            yield Line((f"{factor:g} times", shown, str(len(steps)), load_average()), after, target, at_least=False)

    title = f"one of {setting.ranks} ranks slow from step {setting.clean} on; sleeping blocks"
    return Table(title, ("slow", "reported after", "reports", "load"), lines())


def false_reports(steps: int, ranks: Sequence[int] = (2, 4)) -> Table:
    """Number of reports if no rank is slow."""

    def lines() -> Iterator[Line]:
        for count in ranks:
            setting = SLEEPING._replace(ranks=count, unit=0.001)
            found = _launch(sleeping_plan(setting, Cluster(count)), setting, steps, steps, 1.0).reports
            yield _false_reports_line(f"sleep, {count} ranks", steps, found)
        for count in ranks:
            found = penstock.launch(_train_computing, count, computing_plan(count), steps)[0]
            yield _false_reports_line(f"compute, {count}", steps, found)

    title = f"ranks reported as slow in {steps} clean steps; computing ranks share {num_cores()} cores"
    return Table(title, ("ranks", "steps", "reported", "load"), lines())


def replans(setting: Setting, factors: Sequence[float] = (1.5, 2.0, 4.0)) -> Table:
    """Seconds per step with a slow rank: the plan for equal ranks and the plan for these ranks, both measured."""

    def lines() -> Iterator[Line]:
        equal = sleeping_plan(setting, Cluster(setting.ranks))
        for factor in factors:
            made = sleeping_plan(setting, Cluster(setting.ranks, slowness=setting.slowness(factor)))
            before, after = (min(_launch(each, setting, 8, 0, factor).seconds) for each in (equal, made))
            predicted = made.predicted.makespan
            cells = (f"{factor:g} times", f"{before:.3f}", f"{after:.3f}", f"{predicted:.3f}", load_average())
            yield Line((*cells, f"{after / before:.3f}"), after / before, 0.95, at_least=False)

    columns = ("slow", "as planned", "replanned", "predicted", "load", "ratio")
    return Table("seconds per step with one slow rank, minimum of 8; sleeping blocks", columns, lines())


def _false_reports_line(name: str, steps: int, found: list[Any]) -> Line:
    return Line((name, str(steps), str(len(found)), load_average()), float(len(found)), 0.0, at_least=False)


def sleeping_plan(setting: Setting, cluster: Cluster) -> Plan:
    """A plan with the seconds that the blocks sleep as costs."""
    graph = penstock.capture(_sleeping(setting), (_batch(setting)[:1],)).graph
    unit = setting.unit
    costs = tuple(NodeCost(node.name, unit, 2 * unit, unit, unit) for node in graph.nodes)
    measured = Measured(graph, Profile(costs, 3 * unit * len(costs), graph.fingerprint, "slept"))
    return search({setting.microbatches: measured}, PlanOptions(cluster, schedule="1f1b", budget_seconds=2.0))


def computing_plan(ranks: int) -> Plan:
    """A plan for ranks that share the cores of this machine."""
    torch.manual_seed(0)
    cores = num_cores()
    cluster = Cluster(ranks, cores=cores if cores < ranks else None)
    tokens, _ = _tokens()
    return penstock.plan(
        gpt(COMPUTING), (tokens,), ranks=cluster, microbatches=COMPUTING.microbatches, schedule="1f1b", loss_fn=loss
    )


def _launch(plan: Plan, setting: Setting, steps: int, since: int, factor: float) -> RankResult:
    return penstock.launch(_train_sleeping, plan.num_ranks, plan, setting, steps, since, factor)[0]


def _train_sleeping(plan: Plan, setting: Setting, steps: int, since: int, factor: float) -> RankResult:
    """Trains; from step `since` on, the blocks of one rank sleep `factor` times as long."""
    warnings.filterwarnings("ignore", "hooks on parameters")  # those of SleepingBlock
    model = _sleeping(setting)
    pipe, advisor = penstock.Pipeline(model, plan, loss_fn=nn.functional.mse_loss), SlowRankAdvisor(plan)
    batch, result = _batch(setting), RankResult([], [])
    for step in range(steps):
        for block in model if step == since and torch.distributed.get_rank() == setting.slow_rank else ():
            assert isinstance(block, SleepingBlock)
            block.unit = factor * setting.unit
        trace = pipe.step(batch, target=batch, record=True).trace
        assert trace is not None
        result.seconds.append(trace.makespan)
        if pipe.is_first and (report := advisor.observe(step, trace)):
            result.reports.append((step, report))
    return result


def _train_computing(plan: Plan, steps: int) -> list[tuple[int, str]]:
    torch.manual_seed(0)
    pipe, advisor, reports = penstock.Pipeline(gpt(COMPUTING), plan, loss_fn=loss), SlowRankAdvisor(plan), []
    tokens, target = _tokens()
    for step in range(steps):
        trace = pipe.step(tokens, target=target, record=True).trace
        assert trace is not None
        if pipe.is_first and (report := advisor.observe(step, trace)):
            reports.append((step, report))
    return reports


def _sleeping(setting: Setting) -> nn.Sequential:
    return nn.Sequential(*(SleepingBlock(setting.unit) for _ in range(4 * setting.ranks)))


def _batch(setting: Setting) -> Tensor:
    return torch.ones(setting.microbatches, SIZE)


def _tokens() -> tuple[Tensor, Tensor]:
    shape = (COMPUTING.samples, COMPUTING.length)
    both = torch.randint(COMPUTING.vocabulary, (2, *shape), generator=torch.Generator().manual_seed(0))
    return both[0], both[1]
