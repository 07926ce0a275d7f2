"""hoist_receives: earlier by a bounded number of passes, and never against the common sequence of a pair."""

from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Action, Message, Overlap, Program, Recv
from penstock.ir import ComputeAction as Compute
from penstock.passes import AddTransfers, HoistReceives
from penstock.schedules import SCHEDULES, build
from tests.passes.corpus import some_cuts


def passes_before(order: tuple[Action, ...], recv: Recv) -> int:
    return sum(isinstance(action, Compute | Overlap) for action in order[: order.index(recv)])


def conversation(program: Program, rank: int, other: int) -> list[Action]:
    """The messages between one rank and another, in order."""
    return [a for a in program.orders[rank] if isinstance(a, Message) and program.placement[a.peer] == other]


def lowered(name: str, shape: int = 0) -> Program:
    schedule = build(name, 4, 5)
    return AddTransfers()(schedule.with_cuts(some_cuts(schedule.num_stages, shape)))


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_receive_moves_up_over_at_most_the_stated_number_of_passes(name: str, ahead: int) -> None:
    before = lowered(name)
    after = HoistReceives(ahead)(before)
    for old, new in zip(before.orders, after.orders, strict=True):
        moved = [passes_before(old, a) - passes_before(new, a) for a in old if isinstance(a, Recv)]
        assert all(0 <= passes <= ahead for passes in moved)
        assert ahead < 2 or max(moved) >= 1


@pytest.mark.parametrize("shape", range(4))
@pytest.mark.parametrize("name", SCHEDULES)
def test_two_ranks_keep_their_common_sequence_of_messages(name: str, shape: int) -> None:
    before = lowered(name, shape)
    after = HoistReceives(ahead=100)(before)
    for rank in range(4):
        for other in range(4):
            assert conversation(after, rank, other) == conversation(before, rank, other)


@pytest.mark.parametrize("name", SCHEDULES)
def test_everything_but_the_receives_stays(name: str) -> None:
    before, after = lowered(name), HoistReceives(ahead=3)(lowered(name))
    for old, new in zip(before.orders, after.orders, strict=True):
        assert [a for a in new if not isinstance(a, Recv)] == [a for a in old if not isinstance(a, Recv)]


def test_a_receive_stops_below_a_send_to_the_same_rank() -> None:
    before = Program.from_csv("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1F0 1B0 1F1 1B1")
    after = HoistReceives(ahead=4)(before)
    assert str(after).splitlines()[0] == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1"


def test_a_receive_passes_a_send_to_another_rank() -> None:
    before = Program.from_csv("0F0\n1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1\n2F0")
    after = HoistReceives(ahead=1)(before)
    assert str(after).splitlines()[1] == "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1"


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_nothing_ahead_the_program_stays_as_it_is(name: str) -> None:
    assert HoistReceives(ahead=0)(lowered(name)) == lowered(name)


def test_a_program_without_messages_stays_as_it_is() -> None:
    program = AddTransfers()(build("gpipe", 1, 2).with_cuts())
    assert HoistReceives()(program) == program


@pytest.mark.parametrize("ahead", [-1, 1.5, True, "2"])
def test_looking_back_or_not_by_whole_passes_is_refused(ahead: Any) -> None:
    with pytest.raises(ScheduleError, match=rf"ahead must be a whole number, 0 or more \(ahead: {ahead!r}\)"):
        HoistReceives(ahead)
