"""lower: passes by name or with options, always in the order of the table."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Kind, Program, Schedule
from penstock.passes import PASSES, AddTransfers, HoistReceives, Pass, lower
from penstock.schedules import build


def test_passes_run_in_the_order_of_the_table() -> None:
    schedule = build("zb_h1", 2, 2)
    assert lower(schedule, passes=list(reversed(PASSES))) == lower(schedule, passes=list(PASSES))


def test_a_pass_can_be_given_with_its_options() -> None:
    schedule = build("1f1b", 3, 4)
    given = lower(schedule, passes=["add_transfers", HoistReceives(ahead=1)])
    assert given == HoistReceives(ahead=1)(AddTransfers()(schedule.with_cuts()))


def test_an_unknown_pass_is_named_with_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"unknown pass \(name: 'add_transfer'\)\ntry: one of add_transfers, hoist"):
        lower(build("gpipe", 2, 2), passes=["add_transfer"])


class OwnPass(Pass):
    name = "own_pass"

    def __call__(self, program: Program) -> Program:
        return program


def test_a_pass_that_is_not_in_the_table_is_refused_as_its_place_is_not_known() -> None:
    with pytest.raises(ScheduleError, match=r"unknown pass \(name: 'own_pass'\)\ntry: one of add_transfers, hoist"):
        lower(build("gpipe", 2, 2), passes=["add_transfers", OwnPass()])


def test_lowering_without_messages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="must run add_transfers"):
        lower(build("gpipe", 2, 2), passes=["hoist_receives", "add_frees"])


@pytest.mark.parametrize("subject", ["x", None], ids=["text", "nothing"])
def test_only_a_schedule_or_a_program_is_lowered(subject: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"lower must be given a Schedule or a Program \(got: (str|NoneType)\)"):
        lower(subject)


def test_a_program_keeps_its_order_and_gets_only_the_kinds_of_action_that_it_lacks() -> None:
    program = lower(build("zb_h1", 2, 3), passes=["add_transfers"])
    whole = lower(program)
    assert lower(whole) == whole
    added = [[action for action in order if action.kind in (Kind.REDUCE, Kind.FREE)] for order in whole.orders]
    assert [len(actions) for actions in added] == [4, 4]
    rest = [[action for action in order if action not in more] for order, more in zip(whole.orders, added, strict=True)]
    assert tuple(map(tuple, rest)) == program.orders
