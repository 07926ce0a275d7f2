"""Schedule: per-rank orders of compute actions, and what is none."""

import pytest

from penstock.errors import FormatError, ScheduleError
from penstock.ir import MAX_MICROBATCHES, MAX_STAGES, Backward, Forward, Orders, Overlap, Placement, Schedule, Send

F, B = Forward, Backward
LINE = Placement((0, 1))
ORDERS = [[F(0, 0), F(0, 1), B(0, 0), B(0, 1)], [F(1, 0), B(1, 0), F(1, 1), B(1, 1)]]
SCHEDULE = Schedule.of(LINE, 2, ORDERS)


def test_a_schedule_shows_its_orders_and_sizes():
    assert SCHEDULE.orders == tuple(map(tuple, ORDERS))
    assert (SCHEDULE.num_ranks, SCHEDULE.num_stages, SCHEDULE.num_microbatches) == (2, 2, 2)


def test_a_schedule_prints_a_line_per_rank():
    assert str(SCHEDULE) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def test_equal_schedules_are_equal_and_hash_alike():
    same = Schedule.of(LINE, 2, ORDERS)
    assert same == SCHEDULE
    assert hash(same) == hash(SCHEDULE)
    assert Schedule.of(LINE, 3, ORDERS) != SCHEDULE


def test_csv_holds_the_whole_schedule(tmp_path):
    path = tmp_path / "schedule.csv"
    assert SCHEDULE.to_csv(path) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert Schedule.from_csv(path) == Schedule.from_csv(str(path)) == Schedule.from_csv(SCHEDULE.to_csv()) == SCHEDULE


def test_the_placement_is_read_from_the_orders():
    assert Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0").placement == Placement.vee(2)


@pytest.mark.parametrize(
    "action", [F(1, 0), F(2, 0), F(0, 2), Overlap(F(0, 0), B(1, 0)), Overlap(F(0, 0), B(0, 2))], ids=str
)
def test_a_rank_runs_only_stages_and_microbatches_that_it_holds(action):
    with pytest.raises(ScheduleError, match="that this rank does not hold"):
        Schedule.of(LINE, 2, [[action], []])


def test_the_error_says_which_action_of_which_rank():
    with pytest.raises(ScheduleError, match=r"action: 0B9, rank: 0, position: 1, stages of the rank: \(0,\)"):
        Schedule.of(LINE, 2, [[F(0, 0), B(0, 9)], []])


def test_messages_belong_in_a_program():
    with pytest.raises(ScheduleError, match=r"compute actions only \(action: 0SEND_F0\)\ntry: read it as a Program"):
        Schedule.of(LINE, 1, [[F(0, 0), Send(0, 0, 1)], []])
    with pytest.raises(ScheduleError, match="compute actions only"):
        Schedule.from_csv("0F0,0SEND_F0\n1RECV_F0,1F0")


@pytest.mark.parametrize("num_microbatches", [0, -1, MAX_MICROBATCHES + 1])
def test_microbatches_have_limits(num_microbatches):
    with pytest.raises(ScheduleError, match="microbatches out of range"):
        Schedule.of(LINE, num_microbatches, [[], []])


def test_stages_have_a_limit():
    with pytest.raises(ScheduleError, match="too many stages"):
        Schedule(Placement((0,) * (MAX_STAGES + 1)), 1, Orders.of([[]]))


def test_every_rank_needs_an_order():
    with pytest.raises(ScheduleError, match=r"one order per rank is needed \(orders: 1, ranks: 2\)"):
        Schedule.of(LINE, 1, [[F(0, 0)]])


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FormatError, match="cannot read the schedule file"):
        Schedule.from_csv(tmp_path / "none.csv")


def test_an_order_is_repeated_for_more_microbatches():
    order = Schedule.of(Placement((0,)), 2, [[Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)]])
    assert " ".join(map(str, order.repeated(3).orders[0])) == "0F0 0F1 0B0 0B1 0F2 0B2"
    assert order.repeated(1) == order.first(1)
    assert order.repeated(2) == order
