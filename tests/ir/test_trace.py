"""Trace: what happened when, and the figures that follow from it."""

from math import inf, nan

import pytest

from penstock.errors import ScheduleError
from penstock.ir import (
    Backward,
    Curve,
    Cuts,
    Forward,
    Idle,
    Placement,
    Program,
    Recv,
    Send,
    Series,
    Span,
    Trace,
    Transfer,
)

# rank 0:  F F . . . . . B B B B        2 s of forward, 4 s of backward
# rank 1:  . . . F F B B . . . .        messages take 1 s
PROGRAM = Program.of(
    Placement((0, 1)),
    1,
    Cuts.chain(2),
    [
        [Forward(0, 0), Send(0, 0, 1), Recv(0, 0, 1), Backward(0, 0)],
        [Recv(1, 0, 0), Forward(1, 0), Backward(1, 0), Send(1, 0, 0)],
    ],
)
CURVES = (Curve(Series([0, 2, 11]), Series([10, 30, 10])), Curve(Series([]), Series([])))


def trace(**changed):
    parts = {
        "starts": Series([0, 2, 2, 7, 0, 3, 5, 7]),
        "ends": Series([2, 2, 2, 11, 0, 5, 7, 7]),
        "sent": Series([2, 7]),
        "arrived": Series([3, 8]),
        "memory": CURVES,
    }
    return Trace(PROGRAM, **{**parts, **changed})


def test_spans_name_rank_action_and_times():
    spans = trace().spans
    assert spans[3] == Span(0, Backward(0, 0), 7.0, 11.0)
    assert [span.rank for span in spans] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_transfers_name_both_ranks_and_times():
    assert trace().transfers == (Transfer(0, 1, Send(0, 0, 1), 2.0, 3.0), Transfer(1, 0, Send(1, 0, 0), 7.0, 8.0))


def test_length_is_measured_both_ways():
    assert (trace().makespan, trace().span) == (11.0, 11.0)
    assert trace().windows == ((0.0, 11.0), (3.0, 7.0))


def test_bubbles_are_what_is_not_work():
    assert trace().work == (6.0, 4.0)
    assert trace().bubble == pytest.approx(1 - 10 / 22)
    assert trace().span_bubble == pytest.approx(1 - 10 / 22)


def test_span_is_the_longest_window_of_one_rank():
    late = trace(starts=Series([4, 2, 2, 7, 0, 3, 5, 7]), ends=Series([6, 2, 2, 11, 0, 5, 7, 7]))
    assert late.span == 7.0
    assert late.span_bubble == pytest.approx(1 - 10 / 14)


def test_idle_time_is_split_without_remainder():
    assert trace().idle == (Idle(0.0, 5.0, 0.0, 0.0), Idle(3.0, 0.0, 0.0, 4.0))
    assert all(sum(idle) + work == 11.0 for idle, work in zip(trace().idle, trace().work, strict=True))


def test_a_rank_with_less_work_has_imbalance_before_it_waits():
    gap = trace(ends=Series([2, 2, 2, 11, 0, 5, 7, 7]), starts=Series([0, 2, 2, 7, 0, 3, 6, 7]))
    assert gap.idle[1] == Idle(3.0, 0.0, 1.0, 4.0)


def test_peak_bytes_are_the_top_of_the_curve():
    assert (trace().peak_bytes(0), trace().peak_bytes(1)) == (30, 0)


def test_equal_traces_are_equal_and_hash_alike():
    assert trace() == trace()
    assert hash(trace()) == hash(trace())
    assert trace() != trace(sent=Series([2.5, 7]))


def test_a_program_without_actions_takes_no_time():
    empty = Program.of(Placement((0,)), 1, Cuts.chain(1), [[]])
    nothing = Trace(empty, Series([]), Series([]), Series([]), Series([]), CURVES[:1])
    assert (nothing.makespan, nothing.span, nothing.bubble, nothing.idle) == (0.0, 0.0, 0.0, (Idle(0, 0, 0, 0),))


@pytest.mark.parametrize("name", ["starts", "ends", "sent", "arrived"])
def test_every_action_has_its_times(name):
    with pytest.raises(ScheduleError, match=rf"{name} does not match the program \(entries: 1"):
        trace(**{name: Series([0.0])})


def test_every_rank_has_its_memory():
    with pytest.raises(ScheduleError, match=r"one memory curve per rank is needed \(curves: 1, ranks: 2\)"):
        trace(memory=CURVES[:1])


def test_a_curve_has_a_time_for_every_figure():
    with pytest.raises(ScheduleError, match="must have the same length"):
        Curve(Series([0.0]), Series([]))


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_rank_that_does_not_exist_has_no_peak(rank):
    with pytest.raises(ScheduleError, match=rf"no such rank \(rank: {rank}, ranks: 2\)"):
        trace().peak_bytes(rank)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"starts": [-1, 2, 2, 7, 0, 3, 5, 7]}, r"start must be finite seconds, 0 or more \(index: 0, start: -1.0\)"),
        ({"starts": [0, 2, 2, 12, 0, 3, 5, 7]}, r"not before start \(index: 3, start: 12.0, end: 11.0\)"),
        ({"ends": [2, 2, 2, inf, 0, 5, 7, 7]}, r"end must be finite seconds"),
        ({"ends": [2, 2, 2, nan, 0, 5, 7, 7]}, r"end must be finite seconds"),
        ({"sent": [2, 9]}, r"must not arrive before it is sent \(index: 1, sent: 9.0, arrived: 8.0\)"),
        ({"arrived": [3, nan]}, "must not arrive before it is sent"),
    ],
)
def test_times_that_cannot_be_are_refused(wrong, problem):
    with pytest.raises(ScheduleError, match=problem):
        trace(**{name: Series(values) for name, values in wrong.items()})


@pytest.mark.parametrize(
    ("seconds", "held", "problem"),
    [
        ([0, 2, 1], [1, 1, 1], r"ascending \(index: 1, seconds: 1.0\)"),
        ([0, nan], [1, 1], "finite and ascending"),
        ([0, 1], [1, -1], r"0 or more \(index: 1, bytes: -1.0\)"),
        ([0, 1], [1, inf], "bytes must be finite"),
    ],
)
def test_a_curve_goes_forward_in_time_and_never_below_nothing(seconds, held, problem):
    with pytest.raises(ScheduleError, match=problem):
        Curve(Series(seconds), Series(held))
