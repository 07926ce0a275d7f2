"""resize: the same plan for other numbers of microbatches."""

import pytest

from penstock.ir import Cluster
from penstock.passes import lower, verify
from penstock.planner import Request, search, with_microbatches
from penstock.schedules import build
from tests.planner.chains import measured

MODEL = measured([1.0] * 8)


def plan(schedule):
    return search({4: MODEL}, Request(Cluster(2), schedule, "linear", 2 if schedule == "auto" else None))


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_schedule_of_the_table_is_made_anew(count):
    assert with_microbatches(plan("1f1b"), count).schedule == build("1f1b", 2, count)


@pytest.mark.parametrize("schedule", ["auto", build("zb_h1", 2, 4)], ids=["auto", "given"])
@pytest.mark.parametrize("count", [1, 3, 7, 8])
def test_any_other_order_is_cut_short_or_repeated(schedule, count):
    made = with_microbatches(plan(schedule), count)
    verify(lower(made.schedule, cuts=made.cuts))
    assert made.num_microbatches == count
    assert made.lower_bound <= made.predicted.makespan
