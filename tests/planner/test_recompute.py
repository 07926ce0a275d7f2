"""recompute: less is held and more is computed, and only where memory demands it."""

from dataclasses import replace

import pytest

from penstock.errors import FitError
from penstock.ir import Cluster, Placement
from penstock.partitioners import Problem, divide
from penstock.planner import PlanOptions, search
from tests.planner.chains import measured

MODEL = measured([1.0] * 8)
OPTIONS = PlanOptions(2, schedule="1f1b", partitioner="uniform")


def plan(memory=None, **changed):
    return search({4: MODEL}, replace(OPTIONS, memory=memory, **changed))


def test_recomputation_keeps_less_and_takes_longer():
    whole, again = plan(), plan(recompute="full")
    assert again.choices.recompute == (True, True)
    assert again.predicted.makespan > whole.predicted.makespan
    assert all(less <= more for less, more in zip(again.predicted.peaks, whole.predicted.peaks, strict=True))


def test_it_is_chosen_only_where_memory_demands_it():
    assert plan(recompute="auto").choices.recompute == (False, False)


def test_only_ranks_that_lack_memory_recompute():
    # The first rank of 1f1b holds two microbatches, the last one.
    first, last = plan().predicted.peaks
    assert first > last
    assert plan(memory=(first - 1, last), recompute="auto").choices.recompute == (True, False)


def test_a_recomputed_backward_begins_with_a_forward():
    whole, again = plan().costs, plan(recompute="full").costs
    assert again.backward == tuple(f + b for f, b in zip(whole.forward, whole.backward, strict=True))
    assert again.weight_grad[1] == whole.weight_grad[1]
    assert again.activation_bytes == (0, whole.messages[0].forward_bytes)


# The table has no schedule for this placement: all orders are synthesised.
MIXED = divide("linear", Problem(*MODEL, Cluster(2), Placement((0, 1, 1, 0, 1))))
MIXED_OPTIONS = {"partitioner": MIXED, "schedule": "auto", "budget_seconds": 0.2}


def test_stages_of_a_mixed_placement_recompute_where_that_is_asked_for():
    assert plan(**MIXED_OPTIONS).choices.recompute == (False,) * 5
    assert plan(**MIXED_OPTIONS, recompute="full").choices.recompute == (True,) * 5


def test_stages_of_a_mixed_placement_recompute_where_memory_demands_it():
    least = max(plan(**MIXED_OPTIONS, recompute="full").predicted.peaks)
    assert plan(least, **MIXED_OPTIONS, recompute="auto").choices.recompute == (True,) * 5
    assert plan(10 * least, **MIXED_OPTIONS, recompute="auto").choices.recompute == (False,) * 5


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_a_mixed_placement_that_does_not_fit_is_refused_with_the_shortage(recompute):
    with pytest.raises(FitError, match=r"no order fits in memory \(rank: [01], state: .*, left for activations: 0 B"):
        plan(10, **MIXED_OPTIONS, recompute=recompute)
