"""The plan that would help slow ranks: really planned, from what the stages of the present one say of its nodes."""

from dataclasses import replace

import pytest

from penstock.ir import Cluster, Graph, Link, Node, Plan, Profile, TensorSpec, Value, compute_stage_costs
from penstock.planner import Measured, Request, Watch, search
from penstock.planner.remedy import Remedy, call, remedy
from penstock.planner.spreading import spread
from tests.planner.chains import measured
from tests.planner.steps import Steps, planned

SLOWNESS = (1.0, 1.0, 1.8, 1.0)
UNEQUAL = measured([1.0, 1.5] * 6)


def plan_of(cluster: Cluster, schedule: str = "1f1b") -> Plan:
    return search({8: UNEQUAL}, Request(cluster, schedule, budget_seconds=30.0))


@pytest.mark.parametrize("cluster", [Cluster(4), Cluster(4, slowness=(1, 2, 1, 1))])
def test_spread_costs_are_those_of_the_stages(cluster):
    plan = plan_of(cluster)
    costs = plan.costs_on(Cluster(4))
    found = compute_stage_costs(plan.graph, spread(plan, costs), plan.partition, placement=plan.schedule.placement)
    assert found.forward == pytest.approx(costs.forward)
    assert found.backward == pytest.approx(costs.backward)


def test_the_rows_of_an_embedding_are_looked_up():
    words, vectors = Value("words", TensorSpec((4, 8), "int64")), Value("vectors", TensorSpec((4, 8, 16)))
    weights = (Value("table", TensorSpec((1000, 16))), Value("matrix", TensorSpec((16, 16))))
    nodes = (
        Node("embedding", ("words",), (vectors,), ("table",)),
        Node("layer", ("vectors",), (Value("made", vectors.spec),), ("matrix",)),
    )
    graph = Graph(nodes, (words,), ("made",), weights)
    plan = search({2: Measured(graph, Profile.alike(graph))}, Request(Cluster(1), "gpipe", budget_seconds=0.0))
    profile = spread(plan, plan.costs)
    assert profile["layer"].forward == pytest.approx(17 * profile["embedding"].forward)


def test_the_figure_is_near_that_of_a_plan_from_the_real_profile():
    present, cluster = plan_of(Cluster(4)), Cluster(4, slowness=SLOWNESS)
    found = remedy(present, SLOWNESS, budget_seconds=30.0)
    assert found.helps
    assert found.possible == pytest.approx(plan_of(cluster).predicted.makespan, rel=0.15)
    options = "--ranks 4 --microbatches 8 --slowness 1,1,1.8,1 --schedule 1f1b"
    assert found.call == f"penstock plan MODEL {options} --out plan.json"


def test_what_was_asked_of_the_plan_is_asked_again():
    cluster = Cluster(4, "1MiB", 1e-6, 1e9, cores=2)
    plan = search({8: UNEQUAL}, Request(cluster, budget_seconds=0.0))
    plan = replace(plan, choices=replace(plan.choices, recompute=(True,) * plan.num_stages))
    words = "--memory 1048576 --recompute auto --cores 2 --latency 1e-06 --bandwidth 1000000000.0 --out"
    assert words in call(plan, SLOWNESS)
    assert "--schedule" not in call(plan, SLOWNESS)


def test_what_the_command_line_cannot_say_is_said_in_python():
    plan = plan_of(Cluster(4, links=(Link(0, 1, 1e-3),)))
    words = "penstock.plan(..., ranks=dataclasses.replace(plan.cluster, slowness=(1,1,1.8,1)))"
    assert call(plan, SLOWNESS) == words


def test_a_plan_that_cannot_be_cut_otherwise_has_no_remedy():
    plan = search({8: measured([1.0] * 4)}, Request(Cluster(4), "1f1b", budget_seconds=0.0))
    assert "no plan was found that would help" in str(remedy(plan, SLOWNESS))


def test_a_plan_that_is_too_large_is_not_planned_anew(monkeypatch):
    monkeypatch.setattr("penstock.planner.remedy.MAX_PASSES", 10)
    assert remedy(planned(), SLOWNESS) is None


def test_a_remedy_is_told_with_both_figures():
    words = "a plan for that takes about 310 ms instead of 440 ms a step: penstock plan MODEL"
    assert str(Remedy(0.44, 0.31, "penstock plan MODEL")) == words


def watched(watch: Watch, number: int = 20) -> list[str]:
    steps = Steps(planned())
    return [words for words in (watch.look(step, steps.take({2: 2.0})) for step in range(number)) if words]


def test_a_slow_rank_is_told_once_with_the_plan_that_would_help():
    [words] = watched(Watch(planned()))
    assert words.startswith("rank 2 is slow from the start")
    assert " times its peers; a plan for that takes about " in words
    assert " --slowness 1,1,2" in words


def test_advice_that_fails_does_not_end_a_training(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr("penstock.planner.watch.remedy", broken)
    [words] = watched(Watch(planned()))
    assert "; to plan for that: penstock plan MODEL --ranks 4" in words


def test_the_slowness_of_a_plan_for_slow_ranks_is_counted_on():
    plan = replace(planned(), cluster=Cluster(4, slowness=(1, 1, 1.5, 1)))
    watch = Watch(plan)
    watched(watch)
    assert watch.slowness[2] == pytest.approx(3.0, rel=0.1)
    assert watch.slowness[:2] == (1.0, 1.0)
