"""Plans and profiles for other numbers and sizes of microbatches."""

from dataclasses import replace

import pytest

from penstock.errors import PlanError
from penstock.passes import lower, verify
from penstock.planner import PlanOptions, interpolate_profile, search, with_microbatches
from penstock.schedules import build
from penstock.simulate import simulate
from tests.planner.chains import KEPT, chain, measured

MODEL = measured([1.0] * 8)
SMALL, LARGE = measured([1.0, 2.0]).profile, measured([3.0, 2.0]).profile


def plan(schedule):
    return search(
        {4: MODEL},
        PlanOptions(2, schedule=schedule, partitioner="linear", stages_per_rank=2 if schedule == "auto" else None),
    )


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_schedule_of_the_table_is_rebuilt(count):
    assert with_microbatches(plan("1f1b"), count).schedule == build("1f1b", 2, count)


@pytest.mark.parametrize("schedule", ["auto", build("zb_h1", 2, 4)], ids=["auto", "given"])
@pytest.mark.parametrize("count", [1, 3, 7, 8])
def test_any_other_order_is_cut_short_or_repeated(schedule, count):
    made = with_microbatches(plan(schedule), count)
    verify(lower(made.schedule, cuts=made.cuts))
    assert made.num_microbatches == count
    assert made.lower_bound <= made.predicted.makespan


def synthesised(memory=None):
    """A plan with an order that is none of the table."""
    made = plan(build("zb_h1", 2, 4))
    return replace(made, choices=replace(made.choices, schedule="auto"), cluster=replace(made.cluster, memory=memory))


def test_a_synthesised_order_is_not_repeated_if_a_schedule_of_the_table_is_faster():
    short = synthesised()
    repeated = lower(short.schedule.repeated(16), cuts=short.cuts)
    assert with_microbatches(short, 16).predicted.makespan < 0.95 * simulate(repeated, short.costs).makespan
    given = plan(build("zb_h1", 2, 4))
    assert with_microbatches(given, 16).schedule == given.schedule.repeated(16)


def test_a_schedule_of_the_table_replaces_a_synthesised_order_only_if_it_fits():
    too_small = synthesised(memory=max(synthesised().predicted.peaks) - 1)
    assert with_microbatches(too_small, 16).schedule == too_small.schedule.repeated(16)


def test_interpolated_seconds_lie_on_the_line():
    found = interpolate_profile(chain(2), 0.25, SMALL, LARGE)
    assert [cost.forward for cost in found.costs] == [1.5, 2.0]
    assert found.step_seconds == SMALL.step_seconds + 0.25 * (LARGE.step_seconds - SMALL.step_seconds)


def test_interpolated_bytes_are_whole():
    assert interpolate_profile(chain(2), 1 / 3, SMALL, LARGE)["layers.0"].memory.kept == KEPT


def test_profiles_of_another_model_are_refused():
    with pytest.raises(PlanError, match="must run the same nodes"):
        interpolate_profile(chain(3), 0.5, SMALL, LARGE)
