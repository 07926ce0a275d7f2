"""recompute: less is held and more is computed, and only where memory demands it."""

from dataclasses import replace

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
