"""The critical path: an unbroken chain that explains the makespan."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from penstock.ir import (
    Cluster,
    Cuts,
    Kind,
    MessageCost,
    Orders,
    Schedule,
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
