"""A rank of several processes becomes slow, and the first rank reports which one, since when, and a remedy."""

from unittest import mock

import pytest
import torch
from torch import distributed, nn

import penstock
from benchmarks import sleeping as sleeping_blocks
from benchmarks.sleeping import SIZE, SleepingBlock
from penstock.ir import Cluster, NodeCost, Plan, Profile
from penstock.planner import Measured, PlanOptions, SlowRankAdvisor, search
from penstock.runtime import executor
from tests.process_pool import Pools

RANKS, MICROBATCHES, UNIT = 3, 4, 0.002
CLEAN, SLOW = 10, 10
BATCH = torch.ones(MICROBATCHES, SIZE)


def sleeping() -> nn.Sequential:
    """Two blocks for every rank."""
    return nn.Sequential(*(SleepingBlock(UNIT) for _ in range(2 * RANKS)))


def planned() -> Plan:
    graph = penstock.capture(sleeping(), (BATCH[:1],)).graph
    costs = tuple(NodeCost(node.name, UNIT, 2 * UNIT, UNIT, UNIT) for node in graph.nodes)
    measured = Measured(graph, Profile(costs, 3 * UNIT * len(costs), graph.fingerprint, "slept"))
    return search({MICROBATCHES: measured}, PlanOptions(Cluster(RANKS), schedule="1f1b", budget_seconds=0.0))


class Clock:
    """Advances by sleeps only, so that passes take as long as they sleep, however busy the machine is."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        """Return at once."""
        self.seconds += seconds

    def read(self) -> float:
        """The seconds slept so far."""
        return self.seconds


def reports_on_rank(path: str) -> list[tuple[int, str]]:
    """The reports on this rank and their steps, when the blocks of rank 1 begin to sleep twice as long."""
    plan, model, clock = penstock.Plan.load(path), sleeping(), Clock()
    pipe, advisor = penstock.Pipeline(model, plan, loss_fn=nn.functional.mse_loss), SlowRankAdvisor(plan)
    found = []
    with mock.patch.object(sleeping_blocks, "time", clock), mock.patch.object(executor, "perf_counter", clock.read):
        for step in range(CLEAN + SLOW):
            for block in model if step >= CLEAN and distributed.get_rank() == 1 else ():
                block.unit = 2 * UNIT  # type: ignore[assignment]
            trace = pipe.step(BATCH, target=BATCH, record=True).trace
            if pipe.is_first and trace is not None and (words := advisor.observe(step, trace)):
                found.append((step, words))
    return found


@pytest.mark.gloo
def test_a_rank_that_becomes_slow_is_reported_within_ten_steps(pools: Pools, tmp_path) -> None:
    planned().save(tmp_path / "plan.json")
    first, *others = pools[RANKS].run(reports_on_rank, str(tmp_path / "plan.json"))
    [(step, words)] = first
    assert CLEAN < step < CLEAN + SLOW
    assert words.startswith(f"rank 1 is slow since step {CLEAN}: ")
    assert " --ranks 3 --microbatches 4 --slowness 1," in words
    assert others == [[]] * (RANKS - 1)


def test_the_report_names_the_step_since_which_a_rank_is_slow() -> None:
    plan = planned()
    usual = penstock.simulate(plan)
    slow = penstock.simulate(plan, cluster=Cluster(RANKS, slowness=(1.0, 2.0, 1.0)))
    advisor = SlowRankAdvisor(plan)
    reports = [advisor.observe(step, usual if step < CLEAN else slow) for step in range(CLEAN + SLOW)]
    (words,) = filter(None, reports)
    assert words.startswith(f"rank 1 is slow since step {CLEAN}: ")
