"""Reasons: a plan says in words why it is as it is."""

from penstock.ir.cluster import Cluster
from penstock.planner import Request, search
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


def test_filling_is_the_limit_where_ranks_wait():
    told = reasons([1.0, 1.0, 1.0, 1.0], schedule="1f1b", partitioner="linear")
    assert told[-1].startswith("Filling and draining the pipeline is the limit;")


def test_memory_is_the_limit_where_it_is_full():
    peak = max(search({8: measured([1.0] * 4)}, Request(Cluster(2), "1f1b", "linear")).predicted.peaks)
    told = reasons([1.0, 1.0, 1.0, 1.0], memory=peak, schedule="1f1b", partitioner="linear")
    assert told[-1].startswith("Memory is the limit: rank 0 holds ")
