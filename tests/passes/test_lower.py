"""lower: passes by name or with options, always in the order of the table."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Schedule
from penstock.passes import PASSES, AddTransfers, HoistReceives, lower
from penstock.schedules import build


def test_passes_run_in_the_order_of_the_table() -> None:
    schedule = build("zb_h1", 2, 2)
    assert lower(schedule, passes=list(reversed(PASSES))) == lower(schedule, passes=list(PASSES))


def test_a_pass_can_be_given_with_its_options() -> None:
    schedule = build("1f1b", 3, 4)
    given = lower(schedule, passes=["add_transfers", HoistReceives(ahead=1)])
    assert given == HoistReceives(ahead=1)(AddTransfers()(schedule))


def test_an_unknown_pass_is_named_with_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match=r"unknown pass \(name: 'add_transfer'\)\ntry: one of add_transfers, hoist"):
        lower(build("gpipe", 2, 2), passes=["add_transfer"])


def test_lowering_without_messages_is_refused() -> None:
    with pytest.raises(ScheduleError, match="must run add_transfers"):
        lower(build("gpipe", 2, 2), passes=["hoist_receives", "add_frees"])


@pytest.mark.parametrize("subject", [lower(build("gpipe", 2, 2)), "x", None], ids=["program", "text", "nothing"])
def test_only_a_schedule_is_lowered(subject: Schedule) -> None:
    with pytest.raises(ScheduleError, match=r"lower must be given a Schedule \(got: (Program|str|NoneType)\)"):
        lower(subject)
