"""The order of a pipeline that is not flushed between batches, and the staleness of its weights."""

from itertools import accumulate, pairwise

import pytest

import penstock
from penstock.errors import ScheduleError
from penstock.ir import Backward, Cluster, ComputeAction, Cuts, Forward, StageCosts, StateBytes
from penstock.passes import verify
from penstock.planner import STALENESS, PlanOptions, Stream, plan_staleness, search
from penstock.planner.streams import stream_staleness
from penstock.schedules import build
from tests.planner.chains import measured

COUNTS = ([1], [1] * 20, [2] * 10, [3] * 7, [8] * 3, [4, 4, 1, 3, 2, 2], [7, 1, 1, 1, 5])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_unrolled_order_cannot_deadlock(ranks, counts):
    program = Stream(Cuts.chain(ranks)).unrolled(counts)
    verify(program, in_flight=ranks)
    passes = [tuple(each for each in order if isinstance(each, ComputeAction)) for order in program.orders]
    assert passes == list(build("1f1b", ranks, sum(counts)).orders)


def test_values_without_gradient_may_skip_stages():
    cuts = Cuts.of(4, {(0, 1), (1, 2), (2, 3), (0, 3)}, {(0, 3)})
    verify(Stream(cuts).unrolled([2, 2, 1, 3]))
    with pytest.raises(ScheduleError, match="must be neighbours"):
        Stream(Cuts.of(4, {(0, 1), (1, 2), (2, 3), (0, 3)}))


@pytest.mark.parametrize("ranks", [1, 2, 4, 6])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_staleness_and_versions_are_those_of_the_order(ranks, count):
    """Counted along the order of each rank: weights change after the last backward of a batch."""
    batches = 2 * ranks + 4
    program = Stream(Cuts.chain(ranks)).unrolled([count] * batches)
    for mode in ("stash", "predict"):
        expected = stream_staleness(mode, range(ranks - 1, -1, -1), count)
        for rank, order in enumerate(program.orders):
            assert counted(order, count, mode) == (expected[rank][0], expected[rank][2])


def counted(order, count, mode):
    """The longest staleness, and the most versions other than the present one that are kept at a time."""
    updates, used, longest, kept = 0, {}, 0, 0
    for action in order:
        if isinstance(action, Forward):
            gap = action.microbatch // count - updates
            used[action.microbatch] = (updates, gap if mode == "predict" else 0)
            longest = max(longest, gap)
        if isinstance(action, Backward):
            del used[action.microbatch]
            updates += (action.microbatch + 1) % count == 0
        kept = max(kept, len(set(used.values()) - {(updates, 0)}))
    return longest, kept


def a_plan(ranks=4, microbatches=4, schedule="1f1b"):
    return search({microbatches: measured([1.0] * 8)}, PlanOptions(ranks, schedule=schedule, partitioner="linear"))


def test_a_stream_has_no_bubble_between_batches():
    plan = a_plan(microbatches=2)
    costs = StageCosts.uniform(4)
    flushed = penstock.simulate(plan, costs).makespan
    ends = [penstock.simulate(plan, costs, staleness="stash", batches=n).makespan for n in range(1, 9)]
    assert ends[0] == flushed
    # Forward and backward of two microbatches take 6 seconds on every rank, which is what each further batch adds.
    assert [after - before for before, after in pairwise(ends)] == [6.0] * 7


def test_memory_includes_the_stashed_weights():
    plan = a_plan(microbatches=3)
    costs = StageCosts((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, state=(StateBytes(100),) * 4)
    traces = {mode: penstock.simulate(plan, costs, staleness=mode) for mode in STALENESS}
    peaks = {mode: [trace.peak_bytes(rank) for rank in range(4)] for mode, trace in traces.items()}
    assert peaks["stash"] == [200, 200, 200, 100]
    assert peaks["2bw"] == [200] * 4
    assert peaks["predict"] == [300, 300, 200, 100]


def test_the_bytes_of_a_plan():
    plan = a_plan(microbatches=1)
    sizes = [state.parameters for state in plan.costs.state]
    found = plan_staleness(plan, "stash")
    assert [entry.longest for entry in found] == [3, 2, 1, 0]
    assert [entry.stashed_bytes for entry in found] == [3 * sizes[0], 2 * sizes[1], sizes[2], 0]


@pytest.mark.parametrize(
    ("plan", "staleness", "message"),
    [
        (a_plan(), "fresh", "staleness must be one of"),
        (a_plan(schedule="gpipe"), "stash", "schedule 1f1b"),
        (a_plan(microbatches=2), "2bw", "at least ranks - 1 microbatches"),
    ],
)
def test_what_cannot_run_without_flushes_is_refused(plan, staleness, message):
    with pytest.raises(ScheduleError, match=message):
        penstock.simulate(plan, staleness=staleness)


def test_simulate_needs_a_plan_and_batches():
    with pytest.raises(ScheduleError, match="needs a Plan"):
        penstock.simulate(build("1f1b", 2, 2), staleness="stash")
    with pytest.raises(ScheduleError, match="batches must be"):
        penstock.simulate(a_plan(), staleness="stash", batches=0)


def test_a_slow_rank_takes_longer():
    plan, costs = a_plan(), StageCosts.uniform(4)
    slow = Cluster(4, slowness=(1.0, 2.0, 1.0, 1.0))
    normal, slowed = (penstock.simulate(plan, costs, each, staleness="stash").makespan for each in (None, slow))
    assert slowed > 1.8 * normal


def test_a_stream_repeats_its_chunks():
    stream = Stream(Cuts.chain(4))
    counts = [3] * 9
    starts = [0, *accumulate(counts)]
    chunks = [stream.chunk(before, 3) for before in starts]
    assert chunks[-1] is chunks[-2]
    assert chunks[0].table != chunks[-1].table
