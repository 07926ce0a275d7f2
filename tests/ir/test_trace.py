"""Trace: its measures and checks, series of numbers, and the critical path."""

from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest

from penstock.errors import ScheduleError
from penstock.ir import (
    Backward,
    Cluster,
    Curve,
    Cuts,
    Forward,
    Idle,
    Kind,
    MessageCost,
    Orders,
    Placement,
    Program,
    Recv,
    Schedule,
    Send,
    Series,
    Span,
    StageCosts,
    Trace,
    Transfer,
    critical_path,
)
from penstock.passes import lower
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate

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


def test_bubbles_are_the_time_without_work():
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
    with pytest.raises(ScheduleError, match=r"there must be one memory curve per rank \(curves: 1, ranks: 2\)"):
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
        ({"ends": [2, 2, 2, 1e308, 0, 5, 7, 7]}, r"end must be at most 1e\+100 seconds"),
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


def test_a_series_reads_like_a_tuple():
    series = Series([1, 2.5])
    assert (len(series), series[1], list(series)) == (2, 2.5, [1.0, 2.5])


def test_equal_series_are_equal_and_hash_alike():
    assert Series([1, 2]) == Series(np.array([1.0, 2.0]))
    assert hash(Series([1, 2])) == hash(Series((1.0, 2.0)))
    assert Series([1, 2]) != Series([1, 2, 3])
    assert Series([1]) != (1.0,)


def test_zero_and_minus_zero_are_equal_and_hash_alike():
    assert Series([0.0]) == Series([-0.0])
    assert hash(Series([0.0])) == hash(Series([-0.0]))


def test_a_series_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        Series([1]).values[0] = 2


def test_a_series_does_not_change_with_the_array_it_was_made_from():
    array = np.array([1.0])
    series = Series(array)
    array[0] = 2.0
    assert series[0] == 1.0


def test_a_long_series_prints_its_beginning():
    assert repr(Series(range(8))) == "Series(8: 0, 1, 2, 3, 4, 5, ...)"
    assert repr(Series([0.5])) == "Series(1: 0.5)"


TWO_RANKS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
UNEVEN = StageCosts((1.0, 1.7, 0.9, 1.3), (1.1, 1.0, 2.0, 0.8), (0.5, 0.7, 0.6, 0.9))


def run(csv: str, cluster: Cluster | None = None) -> Trace:
    return simulate(lower(Schedule.from_csv(csv)), None, cluster)


def texts(trace: Trace) -> list[str]:
    return [str(item.action) for item in critical_path(trace)]


def recorded(trace: Trace) -> Trace:
    """The same later and longer, as a clock would have it, with passes still in order."""
    noise = 0.01 * np.random.default_rng(1).random(len(trace.starts))
    later = {name: Series(1.1 * getattr(trace, name).values + noise) for name in ("starts", "ends")}
    return replace(trace, **later)


def test_the_path_of_1f1b_goes_down_the_ranks_and_back() -> None:
    assert texts(run(TWO_RANKS)) == ["0F0", "0SEND_F0", "1F0", "1B0", "1F1", "1B1", "1SEND_B1", "0B1"]


def test_a_message_is_a_transfer_between_ranks() -> None:
    path = critical_path(run(TWO_RANKS, Cluster(2, latency=0.5)))
    assert path[1] == Transfer(0, 1, path[1].action, 1.0, 1.5)
    assert path[2] == Span(1, path[2].action, 1.5, 2.5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_simulated_paths_have_no_gap_from_0_to_the_makespan(name: str) -> None:
    trace = simulate(lower(build(name, 4, 8)), cluster=Cluster(4, latency=0.25))
    path = critical_path(trace)
    assert path[0].start == 0.0
    assert path[-1].end == trace.makespan
    assert all(later.start == pytest.approx(earlier.end) for earlier, later in pairwise(path))


def test_the_items_of_a_path_add_up_to_the_makespan() -> None:
    trace = simulate(lower(build("zb_h1", 4, 8)), UNEVEN, Cluster(4, latency=0.3))
    assert sum(item.end - item.start for item in critical_path(trace)) == pytest.approx(trace.makespan)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe_v"])
def test_in_a_recorded_trace_every_item_starts_when_the_one_before_has_ended(name: str) -> None:
    trace = recorded(simulate(lower(build(name, 4, 8)), cluster=Cluster(4, latency=0.25)))
    path = critical_path(trace)
    assert path[-1].end == trace.makespan
    assert all(earlier.end <= later.start + 1e-9 * trace.makespan for earlier, later in pairwise(path))


def test_a_full_link_is_on_the_path() -> None:
    heavy = replace(StageCosts.uniform(2, 0.1, 0.1, 0.1), messages=(MessageCost(0, 1, 5, 5),))
    trace = simulate(lower(build("gpipe", 2, 3)), heavy, Cluster(2, bandwidth=1.0))
    assert texts(trace)[:4] == ["0F0", "0SEND_F0", "0SEND_F1", "0SEND_F2"]


def test_a_value_that_skips_stages_is_followed_to_its_producer() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n1F0,1B0\n2F0,2B0")
    program = lower(schedule, cuts=Cuts.of(3, [(0, 1), (0, 2), (1, 2)]))
    costs = StageCosts((3.0, 0.1, 1.0), (1.0, 0.1, 3.0), (0.0, 0.0, 0.0), messages=(MessageCost(0, 2, 9, 9),))
    path = texts(simulate(program, costs, Cluster(3, bandwidth=1.0)))
    assert path == ["0F0", "0SEND_F0>2", "2F0", "2B0", "2SEND_B0>0", "0B0"]


def test_an_overlapped_pair_waits_for_both_halves() -> None:
    assert texts(run("0F0,(0F1;0B0)OVERLAP_F_B,0B1")) == ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]


def test_of_a_trace_of_no_length_the_path_ends_all_the_same() -> None:
    trace = run(TWO_RANKS)
    still = {name: Series(0 * getattr(trace, name).values) for name in ("starts", "ends", "sent", "arrived")}
    path = critical_path(replace(trace, **still))
    assert path
    assert len(path) == len(set(path))


def test_a_trace_without_actions_has_no_path() -> None:
    trace, nothing = run(TWO_RANKS), Series(())
    program = replace(trace.program, table=Orders([np.array([], dtype=np.int64)] * 2))
    empty = replace(trace, program=program, **dict.fromkeys(("starts", "ends", "sent", "arrived"), nothing))
    assert critical_path(empty) == ()


def test_a_reduction_that_took_time_ends_the_path() -> None:
    trace = run("0F0,0B0")
    ends = trace.ends.values.copy()
    last = int(np.flatnonzero(trace.program.table.kinds == Kind.REDUCE)[0])
    ends[last] += 2.0
    assert texts(replace(trace, ends=Series(ends))) == ["0F0", "0B0", "0REDUCE_GRAD"]


def test_an_action_that_ran_beside_the_passes_is_not_what_they_waited_for() -> None:
    trace = run("0F0,0B0,0F1,0B1")
    kinds, ends = trace.program.table.kinds, trace.ends.values.copy()
    beside = int(np.flatnonzero(kinds == Kind.FREE)[0])
    ends[beside] += 2.5
    assert texts(replace(trace, ends=Series(ends))) == ["0F0", "0B0", "0F1", "0B1"]
