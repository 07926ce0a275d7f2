"""A recorded step has every action of every rank, in the order that was predicted, on one clock."""

from itertools import pairwise

import pytest
from torch.nn.functional import mse_loss

import penstock
from penstock.ir import Trace
from penstock.schedules import SCHEDULES
from tests.plans import quick_plan
from tests.process_pool import Pools
from tests.selection import every_third
from tests.small_models import WIDTH, chain, noise

X, TARGET = noise(6, WIDTH), noise(6, WIDTH, seed=1)
Row = list[tuple[str, float, float]]


def planned(schedule: str) -> penstock.Plan:
    return quick_plan(chain(8), (X,), ranks=2, microbatches=3, schedule=schedule)


def recorded(plan: penstock.Plan, local: bool = False) -> Trace:
    """The trace of a second step."""
    pipe = penstock.Pipeline(chain(8), plan, loss_fn=mse_loss, local=local)
    pipe.step(X, target=TARGET)
    trace = pipe.step(X, target=TARGET, record=True).trace
    assert trace is not None
    return trace


def rows(trace: Trace) -> list[Row]:
    """For each rank its actions, with start and end, in the order in which they began."""
    found = [[(str(s.action), s.start, s.end) for s in trace.spans if s.rank == rank] for rank in range(2)]
    return [sorted(row, key=lambda item: item[1]) for row in found]


def rows_on_processes(plans: list[penstock.Plan]) -> list[list[Row]]:
    return [rows(recorded(plan)) for plan in plans]


def predicted(plan: penstock.Plan) -> list[list[str]]:
    """The program that the plan was predicted with."""
    return [[str(action) for action in order] for order in penstock.lower(plan.schedule, cuts=plan.cuts).orders]


def assert_in_order(found: list[Row], expected: list[list[str]]) -> None:
    """Every action is there, in its place, and none begins before the one before it has ended."""
    assert [[action for action, _, _ in row] for row in found] == expected
    for row in found:
        assert all(0 <= start <= end for _, start, end in row)
        assert all(before[2] <= after[1] for before, after in pairwise(row))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_local_step_runs_the_predicted_program(schedule: str) -> None:
    plan = planned(schedule)
    assert_in_order(rows(recorded(plan, local=True)), predicted(plan))


@pytest.mark.gloo
def test_processes_run_the_predicted_program(pools: Pools, is_whole: bool) -> None:
    plans = [planned(schedule) for schedule in every_third(SCHEDULES, 1, is_whole)]
    for plan, *found in zip(plans, *pools[2].run(rows_on_processes, plans), strict=True):
        assert found[0] == found[1]
        assert_in_order(found[0], predicted(plan))


def test_a_simulated_step_has_the_same_actions_as_a_recorded_one() -> None:
    plan = planned("1f1b")
    trace = recorded(plan, local=True)
    assert sorted(str(span.action) for span in penstock.simulate(plan).spans) == sorted(
        str(span.action) for span in trace.spans
    )
    assert 0 < trace.span <= trace.makespan
