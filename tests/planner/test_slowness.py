"""Ranks of unequal speed: a slow rank is given less to do, and what is predicted and proven counts its slowness."""

from dataclasses import replace
from itertools import combinations

import pytest

import penstock
from penstock.ir import Cluster, Partition, Placement, Plan, StageCosts, compute_stage_costs
from penstock.planner import PlanOptions, ScheduleProblem, search, synthesise
from penstock.planner.synthesis.exact import prove
from penstock.planner.synthesis.problem import rank_orders
from tests.planner.chains import measured

LAYERS = measured([1.0] * 12)
NAMES = [node.name for node in LAYERS.graph.nodes]
SLOW = Cluster(4, slowness=(1, 1, 1.8, 1))


def planned(cluster: Cluster, schedule: str = "1f1b", microbatches: int = 8) -> Plan:
    return search({microbatches: LAYERS}, PlanOptions(cluster, schedule=schedule, budget_seconds=30.0))


def test_a_slow_rank_is_given_less_to_do():
    alike, slowed = ([len(stage) for stage in planned(each).partition.stages] for each in (Cluster(4), SLOW))
    assert slowed[2] < alike[2]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved"])
def test_a_plan_for_a_slow_rank_is_faster_on_it_than_one_for_ranks_that_are_alike(schedule):
    alike, made = planned(Cluster(4), schedule), planned(SLOW, schedule)
    assert made.predicted.makespan < 0.95 * penstock.simulate(alike, cluster=SLOW).makespan


def test_the_prediction_of_a_plan_counts_the_slowness_once():
    plan = planned(SLOW)
    assert penstock.simulate(plan).makespan == plan.predicted.makespan
    assert penstock.simulate(plan, cluster=Cluster(4)).makespan < plan.predicted.makespan
    there_and_back = replace(plan, cluster=Cluster(4), costs=plan.costs_on(Cluster(4))).costs_on(SLOW)
    assert there_and_back.forward == pytest.approx(plan.costs.forward)


def test_given_costs_are_those_of_ranks_that_are_alike():
    schedule, costs = penstock.schedule("1f1b", 4, 8), StageCosts.uniform(4)
    slowed = penstock.simulate(schedule, costs.times((1, 1, 1.8, 1)))
    assert penstock.simulate(schedule, costs, SLOW).makespan == slowed.makespan
    assert penstock.simulate(schedule, cluster=SLOW).makespan == slowed.makespan
    assert penstock.simulate(planned(Cluster(4)), costs, SLOW).makespan == slowed.makespan


def test_no_cut_into_runs_is_faster_than_the_one_that_is_found():
    cluster, schedule = Cluster(3, slowness=(1, 2, 1)), penstock.schedule("1f1b", 3, 6)
    seconds = []
    for first, second in combinations(range(1, 12), 2):
        partition = Partition((tuple(NAMES[:first]), tuple(NAMES[first:second]), tuple(NAMES[second:])))
        costs = compute_stage_costs(*LAYERS, partition, placement=Placement.loop(3))
        seconds.append(penstock.simulate(schedule, costs, cluster).makespan)
    assert planned(cluster, microbatches=6).predicted.makespan == pytest.approx(min(seconds))


@pytest.mark.parametrize("slowness", [(1, 3), (2.5, 1)])
def test_no_order_on_slow_ranks_undercuts_the_bound_of_the_plan(slowness):
    pytest.importorskip("ortools")
    plan = planned(Cluster(2, slowness=slowness), "zb_h1", 3)
    problem = ScheduleProblem(plan.costs, plan.schedule.placement, 3, plan.cluster, plan.cuts)
    known = rank_orders(synthesise(problem, budget_seconds=0.1, may_prove=False).best.schedule)
    proof = prove(problem, known, bound=0.0, limit_seconds=30.0)
    assert proof.is_optimal
    assert plan.lower_bound <= proof.seconds * (1 + 1e-9) <= plan.predicted.makespan * (1 + 2e-9)


def test_a_plan_lists_the_slow_ranks():
    plan = planned(SLOW)
    assert "slowness per rank: 1, 1, 1.8, 1\n" in str(plan)
    assert ("slowness", "(1.0, 1.0, 1.8, 1.0)") in plan.search.asked
