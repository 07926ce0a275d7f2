"""A Program, costs and a cluster become a Trace."""

from itertools import pairwise
from random import Random

import pytest

from penstock.errors import CostError, ScheduleError
from penstock.ir import Cluster, MessageCost, Program, StageCosts
from penstock.passes import lower
from penstock.schedules import SCHEDULES, build
from penstock.simulate import simulate

PROGRAM = lower(build("1f1b", 2, 2))


def unequal(num_stages, random):
    times = [[random.uniform(0.1, 3.0) for _ in range(num_stages)] for _ in range(4)]
    return StageCosts(*times, messages=[MessageCost(s, s + 1, 4, 3) for s in range(num_stages - 1)])


def test_without_costs_every_pass_takes_a_second_and_a_full_backward_two():
    passes = [span for span in simulate(PROGRAM).spans if hasattr(span.action, "parts")]
    assert [(str(action), start, end) for _, action, start, end in passes] == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0B1", 7, 9),
        ("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7),
    ]  # fmt: skip


def test_a_full_backward_may_cost_other_than_its_halves():
    costs = StageCosts((1,), (1,), (1,), backward=(10,))
    assert simulate(Program.from_csv("0F0,0B0"), costs).makespan == 11
    assert simulate(Program.from_csv("0F0,0I0,0W0"), costs).makespan == 3


def test_everything_but_passes_happens_at_once():
    program = lower(build("zbv", 2, 3), passes=("add_transfers", "add_reductions", "add_shard_moves", "add_frees"))
    trace = simulate(program)
    others = [span for span in trace.spans if not hasattr(span.action, "parts")]
    assert others
    assert all(span.start == span.end for span in others)


def test_the_makespan_counts_from_the_start_of_the_step_and_the_span_from_a_ranks_first_pass():
    trace = simulate(lower(build("zb_h2", 3, 6)))
    assert trace.windows == ((0, 18), (1, 19), (2, 20))
    assert (trace.makespan, trace.span) == (20, 18)
    assert (trace.bubble, trace.span_bubble) == (pytest.approx(0.1), 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_idle_time_of_every_kind_and_work_make_up_the_makespan(name):
    random = Random(name)
    for _ in range(6):
        program = lower(build(name, random.randint(1, 5), random.randint(1, 9)))
        cluster = Cluster(program.num_ranks, latency=0.2, bandwidth=3.0, overlap=0.3)
        trace = simulate(program, unequal(program.num_stages, random), cluster)
        for work, idle in zip(trace.work, trace.idle, strict=True):
            assert min(idle) >= 0
            assert work + sum(idle) == pytest.approx(trace.makespan)
        assert trace.bubble == pytest.approx(sum(map(sum, trace.idle)) / (program.num_ranks * trace.makespan))


def test_the_kinds_of_idle_time_are_where_they_belong():
    #     rank 0 | F F . . B B . B B    waits 2 + 1, ends last
    #     rank 1 | . F B B F B B . .    comes a second late and is done two early
    first, second = simulate(PROGRAM).idle
    assert first == (0, 3, 0, 0)
    assert second == (1, 0, 0, 2)


def test_a_rank_with_less_work_than_the_busiest_is_out_of_balance_rather_than_waiting():
    costs = StageCosts(forward=(1, 3), input_grad=(1, 3), weight_grad=(0, 0))
    first, second = simulate(PROGRAM, costs).idle
    assert (first.imbalance, first.wait) == (8, 2)
    assert (second.imbalance, second.wait) == (0, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_action_starts_before_the_previous_one_has_ended(name):
    random = Random(name)
    for _ in range(6):
        program = lower(build(name, random.randint(1, 5), random.randint(1, 9)))
        trace = simulate(program, unequal(program.num_stages, random), Cluster(program.num_ranks, latency=0.1))
        for before, after in pairwise(trace.spans):
            assert before.rank != after.rank or before.end <= after.start <= after.end
        assert all(list(curve.seconds) == sorted(curve.seconds) for curve in trace.memory)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_program_gives_the_same_trace(name):
    program = lower(build(name, 3, 5))
    assert simulate(program) == simulate(program)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(CostError, match=r"costs must have the same number of stages \(costs: 3, program: 2\)"):
        simulate(PROGRAM, StageCosts.uniform(3))


def test_a_cluster_of_another_number_of_ranks_is_refused():
    with pytest.raises(CostError, match=r"the cluster must have the same number of ranks \(cluster: 4, program: 2\)"):
        simulate(PROGRAM, None, Cluster(4))


def test_a_program_that_blocks_is_refused_with_the_way_to_learn_more():
    stuck = Program.from_csv(
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n1RECV_F1,1F1,1RECV_F0,1F0,1B0,1SEND_B0,1B1,1SEND_B1"
    )
    with pytest.raises(ScheduleError, match=r"cannot run to its end\ntry: penstock.verify\(program\) shows where"):
        simulate(stuck)


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0SEND_F0,0B0\n1RECV_F0,1B0",
        "0F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0",
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1B0,1SEND_B0,1F0",
    ],
    ids=["a pass is missing", "a message is missing", "a pass comes before what it needs"],
)
def test_a_program_that_would_look_fast_because_it_does_not_wait_is_refused(text):
    with pytest.raises(ScheduleError, match="does not make and send everything that its actions need"):
        simulate(Program.from_csv(text))
