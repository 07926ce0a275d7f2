"""What the solver proves, and that synthesised orders are mostly optimal."""

from dataclasses import replace

import pytest

from benchmarks.instances import Instance, instances
from penstock.errors import ScheduleError
from penstock.ir import Cluster, MessageCost, Placement, StageCosts
from penstock.passes import lower, verify
from penstock.planner import ScheduleProblem, synthesise
from penstock.planner.synthesis import exact, lower_bound
from penstock.planner.synthesis.problem import rank_orders, to_schedule
from penstock.schedules import build
from penstock.simulate import simulate

pytest.importorskip("ortools")


def test_the_solver_finds_better_orders_and_they_are_legal() -> None:
    costs = StageCosts((2.0, 3.0, 2.0), (3.0, 2.0, 4.0), (1.0, 2.0, 2.0))
    problem = ScheduleProblem.of(costs, Placement.loop(3), 4)
    proof = exact.prove(problem, rank_orders(build("gpipe", 3, 4)), 0.0, 30.0)
    assert proof.is_optimal
    schedule = to_schedule(problem, proof.orders)
    program = lower(schedule)
    verify(program)
    assert simulate(program, problem.costs, problem.cluster).makespan == pytest.approx(proof.seconds)


def test_bytes_that_an_input_gradient_allocates_are_not_held_before_it() -> None:
    # As of a stage that returns no gradient: it also holds received gradients until its weight gradient.
    costs = StageCosts((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, activation_bytes=(1, 1), weight_grad_bytes=(2, 1))
    problem = ScheduleProblem.of(costs, Placement.loop(2), 3, Cluster(2, memory=(3, 10)))
    one_in_flight = [[0, 2, 3] * 3, [4, 6, 7] * 3]
    proof = exact.prove(problem, one_in_flight, 0.0, 30.0)
    assert proof.is_optimal
    assert proof.seconds == 10.0
    made = simulate(lower(to_schedule(problem, proof.orders)), costs, problem.cluster)
    assert made.makespan == 10.0
    assert made.peak_bytes(0) <= 3


@pytest.mark.untraced
def test_most_orders_are_optimal() -> None:
    found = []
    for instance in instances(12, seed=21, most_ranks=3, microbatches=(2, 5)):
        problem = instance.problem
        made = synthesise(problem, budget_seconds=1.0, may_prove=False)
        proof = exact.prove(problem, rank_orders(made.best.schedule), lower_bound(problem).seconds, 30.0)
        assert proof.is_optimal
        found.append(made.seconds / proof.seconds)
    assert max(found) <= 1.01
    assert sum(ratio < 1 + 1e-9 for ratio in found) >= 11


def test_durations_that_are_no_ticks_are_rounded_down() -> None:
    messages = (MessageCost(0, 1, 10, 10),)
    costs = StageCosts((0.31, 0.47), (0.29, 0.53), (0.11, 0.2), activation_bytes=(1, 1), messages=messages)
    problem = ScheduleProblem.of(costs, Placement.loop(2), 3, Cluster(2, memory=30, latency=0.013, bandwidth=100.0))
    made = synthesise(problem, budget_seconds=0.3, may_prove=False)
    proof = exact.prove(problem, rank_orders(made.best.schedule), 0.0, 30.0)
    assert 0.99 * proof.seconds < proof.bound <= proof.seconds


def test_what_is_proven_from_a_bound_between_two_ticks_is_no_more_than_the_optimum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact, "_TICKS", 4)
    problem = ScheduleProblem.of(StageCosts((0.89, 0.83), (0.59, 0.48), (0.66, 0.58)), Placement.loop(2), 2)
    optimum = lower_bound(problem).seconds * (1 + 1e-8)
    assert synthesise(problem, budget_seconds=0.1, may_prove=False).seconds <= optimum
    assert exact.prove(problem, rank_orders(build("gpipe", 2, 2)), lower_bound(problem).seconds, 5.0).bound <= optimum


def test_the_solver_joins_backwards_that_are_faster_in_one_piece() -> None:
    costs = StageCosts((1.0, 1.0), (2.0, 2.0), (2.0, 2.0), backward=(3.0, 3.0))
    problem = ScheduleProblem.of(costs, Placement.loop(2), 1)
    split = [[0, 2, 3], [4, 6, 7]]
    assert exact.prove(problem, split, 0.0, 5.0).seconds == 7.0


def test_backwards_that_take_no_time_give_back_memory_before_it_is_taken_again() -> None:
    costs = StageCosts((1.0, 0.5), (0.0, 1.0), (0.0, 0.27), activation_bytes=(5, 2))
    problem = ScheduleProblem.of(costs, Placement.loop(2), 2, Cluster(2, memory=9, latency=0.2))
    proof = exact.prove(problem, [[0, 1, 0, 1], [4, 5, 4, 5]], 0.0, 5.0)
    assert lower_bound(problem).seconds <= proof.seconds


@pytest.mark.untraced
def test_small_problems_are_proven_by_themselves() -> None:
    """Here the bound is below the optimum, and the solver closes the gap."""
    problem = Instance(2, 4, 2, "loop", "random", 1, 0, seed=15).problem
    plain, proven = (synthesise(problem, budget_seconds=1.0, may_prove=may_prove) for may_prove in (False, True))
    assert plain.gap > 1e-6
    assert proven.gap == pytest.approx(0.0, abs=1e-6)
    assert "solver" in proven.bound.why


def test_spans_are_refused() -> None:
    problem = replace(instances(1, seed=1)[0].problem, objective="span")
    with pytest.raises(ScheduleError, match="span"):
        exact.prove(problem, [], 0.0)


def test_a_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    with pytest.raises(ScheduleError, match=r"penstock\[solver\]"):
        exact.load()
