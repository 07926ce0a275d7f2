"""The characteristic order of each schedule."""

from textwrap import dedent

import pytest

from penstock.ir import Kind
from penstock.schedules import build


def picture(text):
    return dedent(text).strip("\n")


def warm_up(order, kind):
    """The number of passes before the first one of a kind."""
    return [action.kind for action in order].index(kind)


def test_gpipe_runs_all_forwards_and_then_all_backwards():
    assert str(build("gpipe", 2, 3)) == picture("""
        0F0 0F1 0F2 0B0 0B1 0B2
        1F0 1F1 1F2 1B0 1B1 1B2
        """)


def test_1f1b_alternates_after_a_warm_up_that_shrinks_by_one_per_rank():
    assert str(build("1f1b", 3, 4)) == picture("""
        0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
        1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
        """)


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 2), (6, 3)])
def test_1f1b_warms_up_with_the_ranks_that_are_left_or_all_microbatches(ranks, microbatches):
    orders = build("1f1b", ranks, microbatches).orders
    assert [warm_up(order, Kind.BACKWARD) for order in orders] == [min(microbatches, ranks - r) for r in range(ranks)]


def test_looped_bfs_runs_all_microbatches_of_a_stage_and_returns_in_reverse():
    assert str(build("looped_bfs", 2, 3)) == picture("""
        0F0 0F1 0F2 2F0 2F1 2F2 2B2 2B1 2B0 0B2 0B1 0B0
        1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0
        """)


def test_interleaved_runs_as_many_microbatches_per_stage_as_ranks():
    assert str(build("interleaved", 2, 4)) == picture("""
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
        """)


@pytest.mark.parametrize(("ranks", "microbatches", "stages"), [(4, 8, 2), (4, 10, 3), (3, 9, 4), (5, 5, 1)])
def test_interleaved_schedules_warm_up_by_rounds_and_by_the_ranks_that_are_left(ranks, microbatches, stages):
    size_of_a_round = microbatches // max(1, microbatches // ranks)
    lead = (stages - 1) * size_of_a_round
    for name, pace, kind in (("interleaved", 2, Kind.BACKWARD), ("interleaved_zb", 1, Kind.INPUT_GRAD)):
        orders = build(name, ranks, microbatches, stages).orders
        expected = [min(lead + pace * (ranks - 1 - r), stages * microbatches) for r in range(ranks)]
        # The step that ends the warm-up does a forward first, if one is left.
        assert [warm_up(order, kind) for order in orders] == [min(n + 1, stages * microbatches) for n in expected]


def test_on_one_rank_with_one_stage_interleaved_is_1f1b():
    assert build("interleaved", 1, 5, 1) == build("1f1b", 1, 5)


def test_zb_h1_delays_the_weight_gradients_of_a_rank_by_its_number():
    assert str(build("zb_h1", 3, 4)) == picture("""
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
        """)


def test_zb_h2_starts_twice_as_far_ahead():
    assert str(build("zb_h2", 3, 5)) == picture("""
        0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
        1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
        2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
        """)


def test_interleaved_zb_is_interleaved_with_weight_gradients_of_their_own():
    assert str(build("interleaved_zb", 2, 2)) == picture("""
        0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
        """)


def test_zbv_ends_on_the_rank_where_it_began():
    assert str(build("zbv", 2, 3)) == picture("""
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
        """)


@pytest.mark.parametrize("name", ["zbv", "v_half", "v_min", "dualpipe_v"])
def test_v_schedules_go_down_the_ranks_and_back_up(name):
    assert build(name, 4, 8).placement.ranks == (0, 1, 2, 3, 3, 2, 1, 0)


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "interleaved_zb"])
def test_looping_schedules_go_round_the_ranks(name):
    assert build(name, 4, 8, 3).placement.ranks == (0, 1, 2, 3) * 3


def test_v_min_runs_one_microbatch_to_its_end_before_it_starts_many():
    assert str(build("v_min", 2, 2)) == picture("""
        0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1
        1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1
        """)


def test_dualpipe_v_runs_a_forward_and_a_backward_together():
    assert str(build("dualpipe_v", 1, 4)) == (
        "0F0 1F0 0F1 1B0 (1F1;0B0)OVERLAP_F_B (0F2;1B1)OVERLAP_F_B (1F2;0B1)OVERLAP_F_B "
        "(0F3;1B2)OVERLAP_F_B (1F3;0B2)OVERLAP_F_B 1B3 0I3 0W3"
    )


def test_dualpipe_v_with_few_microbatches_keeps_the_half_of_a_pair_that_exists():
    assert str(build("dualpipe_v", 1, 1)) == "0F0 1F0 1B0 0B0"
    assert str(build("dualpipe_v", 2, 1)) == picture("""
        0F0 3F0 3I0 3W0 0B0
        1F0 2F0 2B0 1B0
        """)
