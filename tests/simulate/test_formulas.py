"""Lengths and peaks that have a formula: P ranks, M microbatches, v stages per rank, F, I, W seconds of a rank."""

import pytest

from penstock.ir import Cluster, StageCosts
from penstock.passes import lower
from penstock.schedules import build
from penstock.simulate import simulate

RANKS = (1, 2, 3, 6, *(pytest.param(ranks, marks=pytest.mark.whole) for ranks in (4, 9)))
TIMES = [(1, 1, 1), (1, 2, 1), (3, 1.5, 1.25)]


def run(name, P, M, times=(1, 1, 1), v=None, **cluster):
    """Times are those of a rank for one microbatch: each of its v stages takes a v-th part."""
    schedule = build(name, P, M, v)
    stages = schedule.num_stages
    parts = [(time * P / stages,) * stages for time in times]
    return simulate(lower(schedule), StageCosts(*parts, activation_bytes=(1,) * stages), Cluster(P, **cluster))


def bubble_seconds(trace):
    return trace.makespan - max(trace.work)


def peaks(trace):
    """Activations in units of one rank's layers for one microbatch."""
    return [trace.peak_bytes(rank) * trace.num_ranks / trace.program.num_stages for rank in range(trace.num_ranks)]


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_idle_for_one_microbatch_per_other_rank(name, P):
    for M in (1, P, 2 * P + 1):
        for F, I, W in TIMES:  # noqa: E741
            assert bubble_seconds(run(name, P, M, (F, I, W))) == pytest.approx((P - 1) * (F + I + W))


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
def test_several_stages_per_rank_divide_the_bubble(name, P):
    for M in (P, 3 * P + 1):
        for v in (1, 2, 3):
            for F, I, W in TIMES:  # noqa: E741
                assert bubble_seconds(run(name, P, M, (F, I, W), v)) == pytest.approx((P - 1) * (F + I + W) / v)


@pytest.mark.parametrize("P", RANKS)
def test_zb_h1_fills_its_bubble_with_weight_gradients_that_are_no_longer_than_the_rest(P):
    for M in (P, 2 * P, 3 * P + 1):
        for F, I, W in [(1, 1, 1), (3, 2, 1), (2, 2, 2), (2, 1.5, 1.25)]:  # noqa: E741
            assert bubble_seconds(run("zb_h1", P, M, (F, I, W))) == pytest.approx((P - 1) * (F + I - W))


@pytest.mark.parametrize("P", RANKS)
@pytest.mark.parametrize("name", ["zbv", "zb_h2"])
def test_equal_passes_leave_no_bubble_between_first_and_last_pass(name, P):
    for M in (2 * P, 2 * P + 1, 5 * P):
        trace = run(name, P, M)
        assert trace.span_bubble == pytest.approx(0.0, abs=1e-12)
        assert trace.makespan == trace.span + (P - 1) / (1 if name == "zb_h2" else 2)


@pytest.mark.untraced
@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize(("F", "I", "W"), [(1, 1, 1), (2, 2, 1), (4, 4, 3), (3, 3, 1)])
def test_dualpipe_v_has_the_idle_time_of_its_formula(F, I, W, overlap):  # noqa: E741
    # (PP/2 - 1)(F&B + B - 3W) with PP = 2P chunks and times of a chunk. It holds where the passes on the way take
    # equal time and weight gradients fit into the gaps, F = I >= W, for the rank with the most overlapped pairs.
    B = I + W
    pair = F + B - overlap * min(F, B)
    for P in (1, 2, 3, 4, 7):
        for M in (2 * P, 2 * P + 3):
            trace = run("dualpipe_v", P, M, (2 * F, 2 * I, 2 * W), overlap=overlap)
            assert trace.makespan - min(trace.work) == pytest.approx((P - 1) * (pair + B - 3 * W))


@pytest.mark.parametrize("P", RANKS)
def test_1f1b_holds_one_microbatch_less_on_every_further_rank(P):
    for M in (1, P, 3 * P):
        assert peaks(run("1f1b", P, M)) == [min(M, P - r) for r in range(P)]


@pytest.mark.parametrize("P", RANKS)
def test_interleaved_holds_a_fraction_more_than_1f1b(P):
    for v in (1, 2, 3, 4):
        assert max(peaks(run("interleaved", P, 4 * P, v=v))) == pytest.approx(P * (1 + (P - 1) / (P * v)))


MOST_HELD = {
    "zb_h1": lambda P: P,
    "zb_h2": lambda P: 2 * P - 1,
    "interleaved_zb": lambda P: P,
    "zbv": lambda P: P,
    "v_half": lambda P: (P + 2) // 2,
    "v_min": lambda P: (P + 4) // 3,
    "dualpipe_v": lambda P: P + 0.5,
}


@pytest.mark.untraced
@pytest.mark.parametrize("P", [*range(1, 12), 16])
@pytest.mark.parametrize("name", MOST_HELD)
def test_the_most_microbatches_held_have_a_formula(name, P):
    assert max(peaks(run(name, P, 3 * P))) == MOST_HELD[name](P)


@pytest.mark.parametrize("name", ["gpipe", "looped_bfs"])
def test_schedules_without_a_limit_hold_every_microbatch(name):
    assert max(peaks(run(name, 4, 11))) == 11
