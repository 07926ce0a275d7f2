"""Run: what a training came to, checked, summed up, saved and loaded."""

import math
from dataclasses import replace

import pytest

from penstock.api.planning import schedule, simulate
from penstock.errors import FormatError, RunError
from penstock.ir import Run, StepMetrics
from tests.ir.test_plan import PLAN

STEPS = tuple(StepMetrics(number, 3.0 - number / 10, seconds, 8) for number, seconds in enumerate((9.0, 2.0, 4.0, 3.0)))
RUN = Run(PLAN, STEPS, (simulate(PLAN),), (5, 6), 1e-7, (("torch", "2.13.0"),))


def test_a_run_is_saved_and_loaded(tmp_path):
    RUN.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == RUN


def test_a_plan_is_no_run(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    with pytest.raises(FormatError, match=r"unexpected type .*type: Plan, expected: Run"):
        Run.load(tmp_path / "plan.json")


def test_a_step_takes_what_most_take_after_the_first():
    assert RUN.step_seconds == 3.0
    assert replace(RUN, steps=STEPS[:1]).step_seconds == 9.0
    assert replace(RUN, steps=()).step_seconds is None


def test_the_last_recorded_step_is_the_trace():
    assert RUN.trace is RUN.traces[-1]
    assert replace(RUN, traces=()).trace is None


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_kept_as_none(figure, tmp_path):
    run = replace(RUN, steps=(StepMetrics(0, figure, 1.0, 8, figure), StepMetrics(1, 2.5, 1.0, 8)))
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json").steps[0] == StepMetrics(0, None, 1.0, 8, None)
    assert run.losses == (2.5,)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"steps": STEPS[::-1]}, "the steps of a run must be in order"),
        ({"peaks": (1,)}, "peaks must have one entry per rank"),
        ({"peaks": (1, -1)}, "peak bytes must be 0 or more"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(changed, problem):
    with pytest.raises(RunError, match=problem):
        replace(RUN, **changed)


def test_a_trace_of_other_ranks_is_refused():
    with pytest.raises(RunError, match=r"must have the ranks of the plan \(ranks: 3, planned: 2\)"):
        replace(RUN, traces=(simulate(schedule("gpipe", 3, 2)),))


@pytest.mark.parametrize(("seconds", "samples"), [(math.nan, 8), (-1.0, 8), (1.0, -1)])
def test_a_step_of_no_time_or_size_is_refused(seconds, samples):
    with pytest.raises(RunError, match=r"0 or more|0 samples or more"):
        StepMetrics(0, 1.0, seconds, samples)
