"""The plan that would help slow ranks: searched with a profile estimated from the stages of the present plan."""

from dataclasses import replace

import pytest

from penstock.ir import Cluster, Graph, Link, Node, Plan, Profile, TensorSpec, Value, compute_stage_costs
from penstock.planner import Measured, PlanOptions, SlowRankAdvisor, search
from penstock.planner.slow_ranks import Replan, estimate_profile, plan_command, replan
from tests.planner.chains import measured
from tests.planner.steps import Steps, planned

SLOWNESS = (1.0, 1.0, 1.8, 1.0)
UNEQUAL = measured([1.0, 1.5] * 6)


def plan_of(cluster: Cluster, schedule: str = "1f1b") -> Plan:
    return search({8: UNEQUAL}, PlanOptions(cluster, schedule=schedule, budget_seconds=30.0))


@pytest.mark.parametrize("cluster", [Cluster(4), Cluster(4, slowness=(1, 2, 1, 1))])
def test_estimated_costs_sum_to_those_of_the_stages(cluster):
    plan = plan_of(cluster)
    costs = plan.costs_on(Cluster(4))
    found = compute_stage_costs(
        plan.graph, estimate_profile(plan, costs), plan.partition, placement=plan.schedule.placement
    )
    assert found.forward == pytest.approx(costs.forward)
    assert found.backward == pytest.approx(costs.backward)


@pytest.mark.parametrize("dtype", ["int64", "uint16"])
def test_the_rows_of_an_embedding_are_looked_up(dtype):
    words, vectors = Value("words", TensorSpec((4, 8), dtype)), Value("vectors", TensorSpec((4, 8, 16)))
    weights = (Value("table", TensorSpec((1000, 16))), Value("matrix", TensorSpec((16, 16))))
    nodes = (
        Node("embedding", ("words",), (vectors,), ("table",)),
        Node("layer", ("vectors",), (Value("made", vectors.spec),), ("matrix",)),
    )
    graph = Graph(nodes, (words,), ("made",), weights)
    plan = search({2: Measured(graph, Profile.uniform(graph))}, PlanOptions(1, schedule="gpipe", budget_seconds=0.0))
    profile = estimate_profile(plan, plan.costs)
    assert profile["layer"].forward == pytest.approx(17 * profile["embedding"].forward)


def test_the_estimate_is_near_a_plan_from_the_real_profile():
    present, cluster = plan_of(Cluster(4)), Cluster(4, slowness=SLOWNESS)
    found = replan(present, SLOWNESS, budget_seconds=30.0)
    assert found.helps
    assert found.possible == pytest.approx(plan_of(cluster).predicted.makespan, rel=0.15)
    options = "--ranks 4 --microbatches 8 --slowness 1,1,1.8,1 --schedule 1f1b"
    assert found.command == f"penstock plan MODEL {options} --out plan.json"


def test_the_command_repeats_the_options_of_the_plan():
    cluster = Cluster(4, "1MiB", 1e-6, 1e9, cores=2)
    plan = search({8: UNEQUAL}, PlanOptions(cluster, budget_seconds=0.0))
    plan = replace(plan, choices=replace(plan.choices, recompute=(True,) * plan.num_stages))
    words = "--memory 1048576 --recompute auto --cores 2 --latency 1e-06 --bandwidth 1000000000.0 --out"
    assert words in plan_command(plan, SLOWNESS)
    assert "--schedule" not in plan_command(plan, SLOWNESS)


@pytest.mark.parametrize("cluster", [Cluster(4, links=(Link(0, 1, 1e-3),)), Cluster(4, overlap=0.5)])
def test_options_that_the_command_line_lacks_are_shown_in_python(cluster):
    plan = plan_of(cluster)
    words = "penstock.plan(..., ranks=dataclasses.replace(plan.cluster, slowness=(1,1,1.8,1)))"
    assert plan_command(plan, SLOWNESS) == words


def test_a_plan_that_cannot_be_cut_otherwise_cannot_be_improved():
    plan = search({8: measured([1.0] * 4)}, PlanOptions(4, schedule="1f1b", budget_seconds=0.0))
    assert "no plan was found that would help" in str(replan(plan, SLOWNESS))


def test_a_plan_that_is_too_large_is_not_searched_again(monkeypatch):
    monkeypatch.setattr("penstock.planner.slow_ranks.MAX_PASSES", 10)
    assert replan(planned(), SLOWNESS) is None


def test_advice_has_both_predictions():
    words = "a plan for that takes about 310 ms instead of 440 ms a step: penstock plan MODEL"
    assert str(Replan(0.44, 0.31, "penstock plan MODEL")) == words


def watched(advisor: SlowRankAdvisor, number: int = 20) -> list[str]:
    steps = Steps(planned())
    return [words for words in (advisor.observe(step, steps.take({2: 2.0})) for step in range(number)) if words]


def test_a_slow_rank_is_reported_once_with_the_plan_that_would_help():
    [words] = watched(SlowRankAdvisor(planned()))
    assert words.startswith("rank 2 is slow from the start")
    assert " times its peers; a plan for that takes about " in words
    assert " --slowness 1,1,2" in words


def test_advice_that_fails_does_not_end_a_training(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("penstock.planner.slow_ranks.replan", broken)
    [words] = watched(SlowRankAdvisor(planned()))
    assert "; to plan for that: penstock plan MODEL --ranks 4" in words


def test_slowness_multiplies_that_of_the_plan():
    plan = replace(planned(), cluster=Cluster(4, slowness=(1, 1, 1.5, 1)))
    advisor = SlowRankAdvisor(plan)
    watched(advisor)
    assert advisor.slowness[2] == pytest.approx(3.0, rel=0.1)
    assert advisor.slowness[:2] == (1.0, 1.0)
