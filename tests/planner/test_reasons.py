"""Reasons: a plan says in words why it is as it is."""

from dataclasses import replace

from penstock.ir import Cluster
from penstock.planner import Measured, Request, search
from penstock.planner.verdict import work_seconds
from tests.planner.chains import measured


def reasons(seconds, memory=None, **asked):
    return search({8: measured(seconds)}, Request(Cluster(2, memory), **asked)).search.reasons


def test_the_busiest_rank_is_named():
    told = reasons([1.0, 1.0, 1.0, 2.0], schedule="1f1b", partitioner="linear")
    assert told[0] == "Rank 1 works most: 72 s of a step, 20.0 % above the mean of the ranks."


def test_a_move_of_one_node_is_told_with_its_price():
    told = reasons([1.0, 1.0, 1.0, 1.0], schedule="1f1b", partitioner="linear")
    assert told[1] == (
        "Cut between stages 0 and 1: 'layers.1' in stage 1 would mean a step 38.9 % longer, "
        "'layers.2' in stage 0 would mean a step 33.3 % longer."
    )


def test_work_is_the_limit_where_ranks_hardly_wait():
    told = reasons([1.0, 1.0, 1.0, 1.0], schedule="zb_h1", partitioner="linear")
    assert told[-1].startswith("The work of rank 0 is the limit; no order of these stages can be more than ")


def test_how_much_shorter_an_order_can_be_is_a_share_of_the_step():
    plan = search({8: measured([1.0] * 4)}, Request(Cluster(2), "gpipe", "linear"))
    shorter = 100 * (1 - plan.lower_bound / plan.predicted.makespan)
    assert f"more than {shorter:.1f} % shorter" in plan.search.reasons[-1]


def test_filling_is_the_limit_where_ranks_wait():
    told = reasons([1.0, 1.0, 1.0, 1.0], schedule="1f1b", partitioner="linear")
    assert told[-1].startswith("Filling and draining the pipeline is the limit;")


def test_memory_is_the_limit_where_it_is_full():
    peak = max(search({8: measured([1.0] * 4)}, Request(Cluster(2), "1f1b", "linear")).predicted.peaks)
    told = reasons([1.0, 1.0, 1.0, 1.0], memory=peak, schedule="1f1b", partitioner="linear")
    assert told[-1].startswith("Memory is the limit: rank 0 holds ")


def test_the_work_of_a_rank_is_that_of_its_passes_as_they_are_ordered():
    """A split backward that takes less than a whole one counts as it is, so that no rank works longer than a step."""
    graph, profile = measured([1.0] * 4)
    split = tuple(replace(cost, backward=3.0) for cost in profile.costs)
    model = Measured(graph, replace(profile, costs=split))
    plan = search({4: model}, Request(Cluster(2), "zb_h1", "uniform", budget_seconds=0.0))
    # The first stage returns no gradient, so that its backward is all weight gradient.
    assert work_seconds(plan) == [4 * 2 * (1.0 + 3.0), 4 * 2 * (1.0 + 1.0 + 1.0)]
