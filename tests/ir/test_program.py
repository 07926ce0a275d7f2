"""Program: orders with messages, and how it is read from text."""

import pytest

from penstock.errors import FormatError, ScheduleError
from penstock.ir import Backward, Cuts, Forward, Orders, Placement, Program, Recv, Send

LINE = Placement((0, 1))
ORDERS = [
    [Forward(0, 0), Send(0, 0, 1), Recv(0, 0, 1), Backward(0, 0)],
    [Recv(1, 0, 0), Forward(1, 0), Backward(1, 0), Send(1, 0, 0)],
]
PROGRAM = Program.of(LINE, 1, Cuts.chain(2), ORDERS)
TEXT = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_a_program_shows_its_orders_and_sizes():
    assert PROGRAM.orders == tuple(map(tuple, ORDERS))
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
    assert PROGRAM.with_table(table) == Program(LINE, 1, Cuts.chain(2), table)


def test_cuts_and_placement_agree_on_the_stages():
    with pytest.raises(ScheduleError, match=r"differ in the number of stages \(cuts: 3, placement: 2\)"):
        Program.of(LINE, 1, Cuts.chain(3), ORDERS)


def test_a_message_names_a_stage_that_exists():
    with pytest.raises(ScheduleError, match=r"a stage that does not exist \(action: 0SEND_F0>6, stages: 2\)"):
        Program.of(LINE, 1, Cuts.chain(2), [[Send(0, 0, 6)], []])
    with pytest.raises(FormatError, match="a stage that has no actions"):
        Program.from_csv("0F0,0SEND_F0>6\n1F0,1B0")


def test_a_rank_sends_only_for_stages_that_it_holds():
    with pytest.raises(ScheduleError, match="that this rank does not hold"):
        Program.of(LINE, 1, Cuts.chain(2), [[Send(1, 0, 0)], []])
