"""Hang reports: the rank that everyone waits for is named first, with what it does."""

import numpy as np

from penstock.ir import Action, Backward, Forward, Recv, Send, encode
from penstock.launch import Failure, Status, explain, occasion_code
from penstock.launch.status import Moment

NOW = 100.0


def note(state: str, action: Action | None = None, ago: float = 0.0, peer: int | None = None, step: int = 4) -> Moment:
    code = int(np.asarray(encode([action]))[0]) if action else None
    return Moment(state, step, code, peer, NOW - ago)


def rank(number: int, *notes: Moment, process: str = "running", failure: str = "") -> Status:
    return Status(number, 1000 + number, process, notes, failure)


def waits(number: int, action: Action, peer: int, ago: float, *before: Moment) -> Status:
    return rank(number, *before, note("waiting", action, ago, peer))


def test_when_all_are_gone_it_is_told_as_it_was() -> None:
    statuses = (
        rank(0, note("waiting", Recv(0, 3, 1), 9, peer=1), process="gone"),
        rank(1, note("working", Forward(1, 3), 10), process="gone"),
        rank(2, note("waiting", Recv(2, 3, 1), 8, peer=1), process="gone"),
    )
    header, culprit, *others = explain(statuses, NOW).splitlines()
    assert header == "all processes are gone; by what they noted last:"
    assert culprit.startswith("rank 1: did not move, working on 1F3 of step 4")
    assert [line.partition(",")[0][:6] for line in others] == ["rank 0", "rank 2"]


def lines(*statuses: Status) -> list[str]:
    return explain(statuses, NOW).splitlines()


def test_the_chain_of_waits_ends_at_a_rank_that_works() -> None:
    assert lines(
        waits(0, Recv(0, 3, 1), 1, ago=58),
        waits(1, Recv(1, 3, 2), 2, ago=60),
        rank(2, note("working", Backward(2, 3), ago=61)),
    ) == [
        "rank 2: did not move, working on 2B3 of step 4 for 61.0 s",
        "rank 0: waiting for 0RECV_B3 of step 4 from rank 1 for 58.0 s",
        "rank 1: waiting for 1RECV_B3 of step 4 from rank 2 for 60.0 s",
    ]


def test_a_stopped_process_is_the_culprit_even_if_it_was_waiting() -> None:
    first, *_ = lines(
        rank(0, note("waiting", Recv(0, 3, 1), 9, peer=1), process="stopped"), waits(1, Recv(1, 3, 0), 0, 8)
    )
    assert first == (
        "rank 0: did not move, its process is stopped (pid 1000), "
        "last waiting for 0RECV_B3 of step 4 from rank 1 for 9.0 s"
    )


def test_a_process_that_is_gone_is_the_culprit() -> None:
    first, _ = lines(rank(0, note("working", Forward(0, 3), 9), process="gone"), waits(1, Recv(1, 3, 0), 0, 8))
    assert first == "rank 0: did not move, its process is gone (pid 1000), last working on 0F3 of step 4 for 9.0 s"


def test_a_failed_rank_is_the_culprit() -> None:
    failed = rank(0, note("working", Forward(0, 3), 9), failure=Failure(0, "KeyError: 'a'").to_json())
    assert lines(failed, waits(1, Recv(1, 3, 0), 0, 8))[0] == (
        "rank 0: did not move, failed in 0F3 of step 4: KeyError: 'a'"
    )


def test_a_rank_that_failed_because_it_waited_is_not_the_culprit() -> None:
    timed_out = rank(1, note("waiting", Recv(1, 3, 2), 9, peer=2), failure=Failure(1, "RunError: in vain").to_json())
    stopped = rank(2, note("working", Backward(2, 3), 9), process="stopped")
    first, second, third = lines(waits(0, Recv(0, 3, 1), 1, 8), timed_out, stopped)
    assert first.startswith("rank 2: did not move, its process is stopped")
    assert second.startswith("rank 0: waiting")
    assert third == "rank 1: failed in 1RECV_B3 of step 4: RunError: in vain"


def test_a_message_that_was_sent_and_never_came_is_lost() -> None:
    sender = rank(0, note("working", Send(0, 3, 1), 7), note("idle", ago=6))
    first, second = lines(sender, waits(1, Recv(1, 3, 0), 0, 8))
    assert first == (
        "rank 0: sent 0SEND_F3 of step 4 7.0 s ago, but rank 1 has not got it: the message was lost; "
        "now between steps for 6.0 s, after step 4"
    )
    assert second == "rank 1: waiting for 1RECV_F3 of step 4 from rank 0 for 8.0 s"


def test_a_message_of_another_step_is_not_the_one_awaited() -> None:
    sender = rank(0, note("working", Send(0, 3, 1), 7, step=3), note("idle", ago=6))
    assert lines(sender, waits(1, Recv(1, 3, 0), 0, 8))[0] == (
        "rank 0: does not send what rank 1 waits for, between steps for 6.0 s, after step 4"
    )


def test_a_rank_that_has_ended_sends_nothing_more() -> None:
    gone = rank(0, note("ended", ago=3), process="gone")
    assert lines(gone, waits(1, Recv(1, 3, 0), 0, 8))[0] == (
        "rank 0: does not send what rank 1 waits for, had done all its work 3.0 s ago"
    )


def test_ranks_that_wait_for_each_other_are_told_once() -> None:
    first, *rest = lines(waits(0, Recv(0, 1, 1), 1, 8), waits(1, Recv(1, 3, 0), 0, 9), waits(2, Recv(2, 3, 1), 1, 7))
    assert first.startswith("rank 1 for rank 0 for rank 1: they wait for each other, so a message was lost")
    assert [line.split(":")[0] for line in rest] == ["rank 0", "rank 2"]


def test_a_send_that_nobody_takes_is_told_as_such() -> None:
    first, second = lines(waits(0, Send(0, 3, 1), 1, 9), rank(1, note("working", Forward(1, 0), 10)))
    assert first == "rank 1: did not move, working on 1F0 of step 4 for 10.0 s"
    assert second == "rank 0: waiting for 0SEND_F3 of step 4 to reach rank 1 for 9.0 s"


def test_where_nobody_waits_the_slowest_is_named_first() -> None:
    slow = rank(1, note("working", Forward(1, 0), 30))
    assert lines(rank(0, note("working", Forward(0, 0), 2)), slow)[0].startswith("rank 1: did not move")


def meets(number: int, name: str, ago: float, step: int = 4) -> Status:
    return rank(number, Moment("meeting", step, occasion_code(name), None, NOW - ago))


def test_who_does_not_come_to_a_meeting_is_named_with_the_step_of_the_meeting() -> None:
    assert lines(meets(0, "step", 9, step=5), rank(1, note("idle", ago=10)), meets(2, "step", 8, step=5)) == [
        "rank 1: did not come to the beginning of step 5, between steps for 10.0 s, after step 4",
        "rank 0: waiting for all ranks at the beginning of step 5 for 9.0 s",
        "rank 2: waiting for all ranks at the beginning of step 5 for 8.0 s",
    ]


def test_a_rank_that_prepares_its_batch_for_long_did_not_come_either() -> None:
    preparing = rank(1, note("preparing", ago=10, step=5))
    assert lines(meets(0, "step", 9, step=5), preparing)[0] == (
        "rank 1: did not come to the beginning of step 5, preparing step 5 for 10.0 s"
    )


def test_a_meeting_that_waits_for_a_rank_that_waits_is_followed_to_its_end() -> None:
    statuses = [
        meets(0, "the end of step", 7),
        waits(1, Recv(1, 3, 2), 2, 8),
        rank(2, note("working", Backward(2, 3), ago=9)),
    ]
    assert lines(*statuses)[0] == "rank 2: did not move, working on 2B3 of step 4 for 9.0 s"


def test_a_stopped_rank_is_the_culprit_even_at_a_meeting() -> None:
    stopped = rank(1, *meets(1, "clip_grad_norm_", 9).recent, process="stopped")
    assert lines(meets(0, "clip_grad_norm_", 8), stopped)[0] == (
        "rank 1: did not move, its process is stopped (pid 1001), "
        "last waiting for all ranks at clip_grad_norm_ before step 4 for 9.0 s"
    )


def test_a_meeting_for_something_unknown_has_words_too() -> None:
    assert lines(meets(0, "a call of tomorrow", 8), rank(1, note("idle", ago=9)))[0].startswith(
        "rank 1: did not come to a call before step 4"
    )


def test_a_rank_of_which_nothing_is_known_is_said_to_be_unknown() -> None:
    assert lines(waits(0, Recv(0, 3, 1), 1, 9), Status(1))[0] == (
        "rank 1: nothing is known of it on this host, and rank 0 waits for it"
    )


def test_several_culprits_are_all_named_before_the_others() -> None:
    statuses = [
        waits(0, Recv(0, 3, 1), 1, 9),
        rank(1, note("working", Forward(1, 0), 10)),
        waits(2, Recv(2, 3, 3), 3, 8),
        rank(3, note("working", Forward(3, 0), 10)),
    ]
    assert [line.split(":")[0] for line in lines(*statuses)] == ["rank 1", "rank 3", "rank 0", "rank 2"]


def test_nothing_is_said_about_nobody() -> None:
    assert lines() == []
