"""Explanations: why a plan was chosen, and what is short if none fits."""

import re
from dataclasses import replace

import pytest

from penstock.errors import PlanError
from penstock.ir import Cluster, Partition
from penstock.planner import Measured, PlanOptions, search
from penstock.planner.explain import work_seconds
from penstock.planner.plan_search import node_moves
from tests.planner.chains import KEPT, chain, measured

GRAPH = chain(4)
MODEL = measured([1.0] * 8)
STATE = 8 * 8 * 8 * 4 * 2
"""parameters and gradients of all layers"""


def reasons(seconds, memory=None, **asked):
    return search({8: measured(seconds)}, PlanOptions(Cluster(2, memory), **asked)).search.reasons


def test_the_busiest_rank_is_named():
    text = reasons([1.0, 1.0, 1.0, 2.0], schedule="1f1b", partitioner="linear")
    assert text[0] == "Rank 1 has the most work: 72 s of a step, 20.0 % above the mean of the ranks."


def test_the_cost_of_moving_one_node_is_reported():
    text = reasons([1.0, 1.0, 1.0, 1.0], schedule="1f1b", partitioner="linear")
    assert text[1] == (
        "Cut between stages 0 and 1: 'layers.1' in stage 1 would mean a step 38.9 % longer, "
        "'layers.2' in stage 0 would mean a step 33.3 % longer."
    )


def test_work_is_the_limit_where_ranks_hardly_wait():
    text = reasons([1.0, 1.0, 1.0, 1.0], schedule="zb_h1", partitioner="linear")
    assert text[-1].startswith("The work of rank 0 is the limit; no order of these stages can be more than ")


def test_how_much_shorter_an_order_can_be_is_a_share_of_the_step():
    plan = search({8: measured([1.0] * 4)}, PlanOptions(2, schedule="gpipe", partitioner="linear"))
    shorter = 100 * (1 - plan.lower_bound / plan.predicted.makespan)
    assert f"more than {shorter:.1f} % shorter" in plan.search.reasons[-1]


def test_filling_is_the_limit_where_ranks_wait():
    text = reasons([1.0, 1.0, 1.0, 1.0], schedule="1f1b", partitioner="linear")
    assert text[-1].startswith("Filling and draining the pipeline is the limit;")


def test_memory_is_the_limit_where_it_is_full():
    peak = max(search({8: measured([1.0] * 4)}, PlanOptions(2, schedule="1f1b", partitioner="linear")).predicted.peaks)
    text = reasons([1.0, 1.0, 1.0, 1.0], memory=peak, schedule="1f1b", partitioner="linear")
    assert text[-1].startswith("Memory is the limit: rank 0 holds ")


def test_the_work_of_a_rank_is_that_of_its_passes_as_they_are_ordered():
    """A split backward that takes less than a whole one counts as it is, so that no rank works longer than a step."""
    graph, profile = measured([1.0] * 4)
    split = tuple(replace(cost, backward=3.0) for cost in profile.costs)
    model = Measured(graph, replace(profile, costs=split))
    plan = search({4: model}, PlanOptions(2, schedule="zb_h1", partitioner="uniform", budget_seconds=0.0))
    # The first stage returns no gradient, so that its backward is all weight gradient.
    assert work_seconds(plan) == [4 * 2 * (1.0 + 3.0), 4 * 2 * (1.0 + 1.0 + 1.0)]


def moves(*stages):
    partition = Partition(tuple(tuple(f"layers.{index}" for index in stage) for stage in stages))
    return [(node, source, target) for _, node, source, target in node_moves(GRAPH, partition)]


def test_a_cut_moves_both_ways():
    assert moves([0, 1], [2, 3]) == [("layers.1", 0, 1), ("layers.2", 1, 0)]


def test_no_stage_becomes_empty():
    assert moves([0], [1, 2, 3]) == [("layers.1", 1, 0)]


def test_every_cut_is_looked_at():
    assert moves([0], [1, 2], [3]) == [("layers.1", 1, 0), ("layers.2", 1, 2)]


def refusal(memory, **asked):
    with pytest.raises(PlanError) as refused:
        search({4: MODEL}, PlanOptions(Cluster(2, memory), **asked))
    return str(refused.value)


def test_the_shortage_is_reported_with_its_numbers():
    text = refusal(8000, schedule="gpipe")
    assert re.search(r"with gpipe, the nearest, rank [01] lacks [\d.]+ KiB: it would hold [\d.]+ KiB of 7.81 KiB", text)
    assert re.search(r"parameters gradients and optimizer: 2 KiB, activations: [\d.]+ KiB", text)


def test_another_schedule_is_suggested_where_it_would_fit():
    assert 'schedule="auto"' in refusal(STATE // 2 + 11 * KEPT, schedule="gpipe")


def test_recomputation_is_suggested_where_it_would_fit():
    assert 'recompute="auto"' in refusal(STATE // 2 + 3 * KEPT)


def test_more_microbatches_are_suggested_where_they_would_fit():
    assert "about microbatches=" in refusal(STATE // 2 + 3 * KEPT)


def test_more_ranks_are_suggested_where_they_would_fit():
    assert "ranks=4" in refusal(STATE // 2 - 1, recompute="full", schedule="1f1b", partitioner="uniform")


def test_ranks_that_would_need_too_many_stages_are_not_suggested(monkeypatch):
    monkeypatch.setattr("penstock.planner.options.MAX_STAGES", 4)
    text = refusal(10, recompute="full", schedule="interleaved", partitioner="uniform", stages_per_rank=2)
    assert "no plan fits in memory" in text
    assert "ranks=" not in text


@pytest.mark.untraced
def test_where_no_change_fits_ranks_with_more_memory_are_suggested():
    assert "ranks with more memory" in refusal(10)
