"""verify: what it refuses, and how the error shows where."""

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Cuts, Program, Schedule
from penstock.passes import lower, verify
from penstock.schedules import SCHEDULES, build

CHAIN = Cuts.chain(2)
LAWFUL = "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"
TWO_MICROBATCHES = "\n".join(
    [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
)


def refusal(subject: Schedule | Program, in_flight: int | None = None) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify(subject, in_flight=in_flight)
    return str(caught.value)


CUTS_HINT = "\ntry: a program read from CSV is taken for a chain of stages: give its cuts, or save it as JSON"


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_and_their_programs_are_accepted(name: str) -> None:
    schedule = build(name, 4, 6)
    verify(schedule)
    verify(lower(schedule))


@pytest.mark.parametrize("text", [LAWFUL, TWO_MICROBATCHES])
def test_a_lawful_program_is_accepted(text: str) -> None:
    verify(Program.from_csv(text))


# ---------------------------------------------------------------------------------------------------------- deadlock


def test_a_deadlock_shows_the_circle_and_the_orders_around_it() -> None:
    schedule = Schedule.from_csv("0F0 0F1 0B0 0B1\n1F1 1B1 1F0 1B0\n2F0 2B0 2F1 2B1")
    assert refusal(schedule).splitlines() == [
        "the orders deadlock: rank 1 -> rank 2 -> rank 1",
        "  rank 1 is blocked at 1B1 (position 1), which needs 2B1 of rank 2",
        "      ... 1F1 [1B1] 1F0 1B0 ...",
        "  rank 2 is blocked at 2F0 (position 0), which needs 1F0 of rank 1",
        "      ... [2F0] 2B0 2F1 2B1 ...",
    ]


def test_a_ring_of_blocking_sends_is_a_deadlock_although_every_pair_agrees() -> None:
    ring = [(0, 4), (1, 5), (2, 3)]
    text = "\n".join(
        [
            "0F0 0SEND_F0>4 3RECV_F0   3F0 3B0 0B0",
            "1F0 1SEND_F0>5 4RECV_F0<0 4F0 4B0 1B0",
            "2F0 2SEND_F0   5RECV_F0<1 5F0 5B0 2B0",
        ]
    )
    program = Program.from_csv(text, Cuts.of(6, ring, without_gradient=ring))
    assert refusal(program).splitlines() == [
        "the orders deadlock: rank 0 -> rank 1 -> rank 2 -> rank 0",
        "  rank 0 is blocked at 0SEND_F0>4 (position 1), which needs 4RECV_F0<0 of rank 1",
        "      ... 0F0 [0SEND_F0>4] 3RECV_F0 3F0 3B0 0B0 ...",
        "  rank 1 is blocked at 1SEND_F0>5 (position 1), which needs 5RECV_F0<1 of rank 2",
        "      ... 1F0 [1SEND_F0>5] 4RECV_F0<0 4F0 4B0 1B0 ...",
        "  rank 2 is blocked at 2SEND_F0 (position 1), which needs 3RECV_F0 of rank 0",
        "      ... 2F0 [2SEND_F0] 5RECV_F0<1 5F0 5B0 2B0 ...",
    ]


def test_only_a_few_actions_around_the_blocked_one_are_shown() -> None:
    forwards = " ".join(f"0F{microbatch}" for microbatch in range(8))
    backwards = " ".join(f"0B{microbatch}" for microbatch in range(8))
    text = refusal(Schedule.from_csv(f"{forwards} 0B8 {backwards} 0F8"))
    assert text.splitlines()[1:] == [
        "  rank 0 is blocked at 0B8 (position 8), which needs 0F8, which comes later in its own order",
        "      ... 0F4 0F5 0F6 0F7 [0B8] 0B0 0B1 0B2 0B3 ...",
    ]


@pytest.mark.parametrize(
    ("order", "needs"),
    [
        ("0B0 0F0", "0B0 (position 0), which needs 0F0, which comes later in its own order"),
        ("0F0 0W0 0I0", "0W0 (position 1), which needs 0I0, which comes later in its own order"),
        ("(0F0;0B0)OVERLAP_F_B", "(0F0;0B0)OVERLAP_F_B (position 0), which needs its own other half"),
        ("1F0 0F0 1B0 0B0", "1F0 (position 0), which needs 0F0, which comes later in its own order"),
    ],
)
def test_a_rank_that_waits_for_itself_is_a_deadlock(order: str, needs: str) -> None:
    assert f"rank 0 is blocked at {needs}" in refusal(Schedule.from_csv(order))


# ---------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0",
            f"an action needs a value that has no Send (action: 1F0, rank: 1, position: 1){CUTS_HINT}",
        ),
        (
            "0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1B0 1SEND_B0",
            f"an action needs a value that has no Recv (action: 1F0, rank: 1, position: 0){CUTS_HINT}",
        ),
        (
            "0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0",
            "a message is sent before its values exist (action: 0SEND_F0, rank: 0, position: 0)",
        ),
        (
            "0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1RECV_F0 1B0 1SEND_B0",
            "a message is received after its values are used (action: 1RECV_F0, rank: 1, position: 1)",
        ),
        (
            "0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0",
            "a message must be issued once (action: 0SEND_F0, rank: 0, position: 2)",
        ),
        (
            "0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1RECV_F0 1F0 1B0 1SEND_B0",
            "a message must be issued once (action: 1RECV_F0, rank: 1, position: 1)",
        ),
    ],
)
def test_a_message_out_of_place_is_named(text: str, problem: str) -> None:
    assert refusal(Program.from_csv(text, CHAIN)) == problem


def test_a_message_that_no_cut_asks_for_is_refused() -> None:
    program = Program.from_csv(LAWFUL, Cuts.of(2, []))
    assert (
        refusal(program)
        == "a message must be needed by a stage on another rank (action: 0SEND_F0, rank: 0, position: 1)"
    )


def test_a_message_within_a_rank_is_refused() -> None:
    program = Program.from_csv("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0")
    assert "by a stage on another rank (action: 0SEND_F0" in refusal(program)


def test_two_ranks_that_disagree_on_the_sequence_are_refused_with_both_sides() -> None:
    program = Program.from_csv(TWO_MICROBATCHES.replace("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0"))
    problem, _, values = refusal(program).partition(" (")
    assert problem.startswith("two ranks issue their messages in different orders")
    assert values == "ranks: (0, 1), first: 0SEND_F0, then 0SEND_F1, second: 1RECV_F1, then 1RECV_F0)"


# ---------------------------------------------------------------------------------- once each, holdings and in flight


@pytest.mark.parametrize(
    ("order", "what", "times"),
    [
        ("0F0 0F0 0B0", "forward", 2),
        ("0F0 0F1 0B1", "input gradient", 0),
        ("0F0 0I0", "weight gradient", 0),
        ("0F0 0B0 0W0", "weight gradient", 2),
        ("0F0 0I0 0B0", "input gradient", 2),
    ],
)
def test_everything_is_made_exactly_once(order: str, what: str, times: int) -> None:
    problem, _, values = refusal(Schedule.from_csv(order)).partition(" (")
    assert problem == f"every stage must make the {what} of every microbatch exactly once"
    assert values.startswith(f"stage: 0, microbatch: 0, rank: 0, times: {times}")
    assert ("missing: 0" in values) == (times == 0)


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        ("0F0 0B0 0FREE0 0FREE0", "a stage's values are freed twice (action: 0FREE0, rank: 0, position: 3)"),
        ("0F0 0FREE0 0B0", "an action uses values after they are freed (action: 0B0, rank: 0, position: 2)"),
        ("0F0 0I0 0FREE0 0W0", "an action uses values after they are freed (action: 0W0, rank: 0, position: 3)"),
        ("0F0 0B0 1F0 1B0 0REDUCE_GRAD", "every stage must be reduced exactly once (stage: 1, times: 0)"),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "every stage must be reduced exactly once (stage: 0, times: 2)"),
        ("0F0 0REDUCE_GRAD 0B0", "a stage is reduced before its last weight gradient (action: 0REDUCE_GRAD, rank: 0"),
        ("0F0 0UNSHARD 0B0", "parameters are not sharded or gathered as the action needs (action: 0F0, rank: 0"),
        ("0UNSHARD 0F0 0RESHARD 0B0", "as the action needs (action: 0B0, rank: 0, position: 3)"),
        ("0UNSHARD 0UNSHARD 0F0 0B0", "as the action needs (action: 0UNSHARD, rank: 0, position: 1)"),
        ("0RESHARD 0UNSHARD 0F0 0B0", "as the action needs (action: 0RESHARD, rank: 0, position: 0)"),
    ],
)
def test_the_memory_of_a_rank_is_tracked(order: str, problem: str) -> None:
    program = Program.from_csv(order, Cuts.of(1 + order.count("1F0"), []))
    assert problem in refusal(program)


def test_a_message_sent_after_its_values_are_freed_is_refused() -> None:
    program = Program.from_csv(LAWFUL.replace("1SEND_B0", "1FREE0 1SEND_B0"))
    assert refusal(program) == "an action uses values after they are freed (action: 1SEND_B0, rank: 1, position: 4)"


def test_at_most_the_stated_number_may_be_in_flight() -> None:
    schedule = Schedule.from_csv("0F0 0F1 0F2 0B0 0B1 0B2")
    verify(schedule, in_flight=3)
    assert refusal(schedule, in_flight=2) == (
        "more microbatches in flight than allowed (action: 0F2, rank: 0, position: 2, most: 3, limit: 2)"
    )


def test_a_microbatch_is_in_flight_until_its_weight_gradient() -> None:
    schedule = Schedule.from_csv("0F0 0I0 0F1 0I1 0W0 0W1")
    verify(schedule, in_flight=2)
    assert "action: 0F1" in refusal(schedule, in_flight=1)


def test_every_rank_is_held_to_the_limit_by_itself() -> None:
    verify(build("1f1b", 4, 8), in_flight=4)
    assert "action: 0F3, rank: 0" in refusal(build("1f1b", 4, 8), in_flight=3)
    assert "action: 0F3, rank: 0" in refusal(lower(build("1f1b", 4, 8)), in_flight=3)


@pytest.mark.parametrize("in_flight", [True, 1.5, -1, "x"])
def test_the_number_in_flight_is_a_count(in_flight: int) -> None:
    problem = f"in_flight must be a count, 0 or more (in flight: {in_flight!r})"
    assert refusal(build("gpipe", 2, 2), in_flight) == problem


def test_only_a_schedule_or_a_program_is_proven() -> None:
    with pytest.raises(ScheduleError, match=r"verify must be given a Schedule or a Program \(got: NoneType\)"):
        verify(None)  # type: ignore[arg-type]
