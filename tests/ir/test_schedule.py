"""Schedule and Program: what they hold, what they refuse, and schedules made from others."""

import pytest

from penstock.errors import FormatError, ScheduleError
from penstock.ir import (
    MAX_MICROBATCHES,
    MAX_STAGES,
    Backward,
    Cuts,
    Forward,
    Orders,
    Overlap,
    Placement,
    Program,
    Recv,
    Schedule,
    Send,
)

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
    with pytest.raises(ScheduleError, match="must be of a stage and a microbatch of its rank"):
        Schedule.of(LINE, 2, [[action], []])


def test_the_error_names_the_action_and_its_rank():
    with pytest.raises(ScheduleError, match=r"action: 0B9, rank: 0, position: 1, stages of the rank: \(0,\)"):
        Schedule.of(LINE, 2, [[F(0, 0), B(0, 9)], []])


def test_messages_belong_in_a_program():
    with pytest.raises(ScheduleError, match=r"compute actions only \(action: 0SEND_F0\)\ntry: Program.from_csv"):
        Schedule.of(LINE, 1, [[F(0, 0), Send(0, 0, 1)], []])
    with pytest.raises(ScheduleError, match="compute actions only"):
        Schedule.from_csv("0F0,0SEND_F0\n1RECV_F0,1F0")


@pytest.mark.parametrize("num_microbatches", [0, -1, MAX_MICROBATCHES + 1])
def test_microbatches_have_limits(num_microbatches):
    with pytest.raises(ScheduleError, match="microbatches must be a whole number from 1 to"):
        Schedule.of(LINE, num_microbatches, [[], []])


def test_stages_have_a_limit():
    with pytest.raises(ScheduleError, match="must have at most 8192 stages"):
        Schedule(Placement((0,) * (MAX_STAGES + 1)), 1, Orders.of([[]]))


def test_every_rank_needs_an_order():
    with pytest.raises(ScheduleError, match=r"there must be one order per rank \(orders: 1, ranks: 2\)"):
        Schedule.of(LINE, 1, [[F(0, 0)]])


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FormatError, match="cannot read the schedule file"):
        Schedule.from_csv(tmp_path / "none.csv")


def test_an_order_is_repeated_for_more_microbatches():
    order = Schedule.of(Placement((0,)), 2, [[Forward(0, 0), Forward(0, 1), Backward(0, 0), Backward(0, 1)]])
    assert " ".join(map(str, order.repeated(3).orders[0])) == "0F0 0F1 0B0 0B1 0F2 0B2"
    assert order.repeated(1) == order.first(1)
    assert order.repeated(2) == order


PROGRAM_LINE = Placement((0, 1))
PROGRAM_ORDERS = [
    [Forward(0, 0), Send(0, 0, 1), Recv(0, 0, 1), Backward(0, 0)],
    [Recv(1, 0, 0), Forward(1, 0), Backward(1, 0), Send(1, 0, 0)],
]
PROGRAM = Program.of(PROGRAM_LINE, 1, Cuts.chain(2), PROGRAM_ORDERS)
TEXT = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_a_program_shows_its_orders_and_sizes():
    assert PROGRAM.orders == tuple(map(tuple, PROGRAM_ORDERS))
    assert (PROGRAM.num_ranks, PROGRAM.num_stages, PROGRAM.num_microbatches) == (2, 2, 1)


def test_csv_holds_the_whole_program(tmp_path):
    assert PROGRAM.to_csv(tmp_path / "program.csv") == TEXT
    assert Program.from_csv(tmp_path / "program.csv") == Program.from_csv(TEXT) == PROGRAM


def test_a_program_prints_a_line_per_rank():
    assert str(PROGRAM) == TEXT.replace(",", " ").strip()


def test_given_cuts_are_kept():
    cuts = Cuts.of(2, [(0, 1)], without_gradient=[(0, 1)])
    assert Program.from_csv("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0", cuts).cuts == cuts


def test_a_message_that_skips_stages_is_an_edge_of_the_cuts():
    program = Program.from_csv("0F0 0SEND_F0>2 0B0\n1F0 1B0\n2RECV_F0<0 2F0 2B0 2SEND_B0>0")
    assert program.cuts == Cuts.of(3, [(0, 1), (0, 2), (1, 2)])


def test_a_skip_whose_gradient_never_returns_has_none():
    program = Program.from_csv("0F0 0SEND_F0>2 0B0\n1F0 1B0\n2RECV_F0<0 2F0 2B0")
    assert program.cuts.without_gradient == ((0, 2),)


def test_other_orders_make_another_program():
    table = Orders.of([[Forward(0, 0)], [Forward(1, 0)]])
    assert PROGRAM.with_table(table) == Program(PROGRAM_LINE, 1, Cuts.chain(2), table)


def test_cuts_and_placement_agree_on_the_stages():
    with pytest.raises(ScheduleError, match=r"must have the same number of stages \(cuts: 3, placement: 2\)"):
        Program.of(PROGRAM_LINE, 1, Cuts.chain(3), PROGRAM_ORDERS)


def test_a_message_names_a_stage_that_exists():
    with pytest.raises(ScheduleError, match=r"a stage that does not exist \(action: 0SEND_F0>6, stages: 2\)"):
        Program.of(PROGRAM_LINE, 1, Cuts.chain(2), [[Send(0, 0, 6)], []])
    with pytest.raises(FormatError, match="a stage that has no actions"):
        Program.from_csv("0F0,0SEND_F0>6\n1F0,1B0")


def test_a_rank_sends_only_for_stages_that_it_holds():
    with pytest.raises(ScheduleError, match="must be of a stage and a microbatch of its rank"):
        Program.of(PROGRAM_LINE, 1, Cuts.chain(2), [[Send(1, 0, 0)], []])
