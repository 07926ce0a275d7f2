"""A hang report names the rank that the others wait for first, with what it is doing."""

import numpy as np

from penstock.ir import Action, Backward, Forward, Recv, Send, encode
from penstock.launch import ErrorReport, RankStatus, StatusEntry, explain_hang, sync_point_code

NOW = 100.0


def note(
    state: str, action: Action | None = None, ago: float = 0.0, peer: int | None = None, step: int = 4
) -> StatusEntry:
    code = int(np.asarray(encode([action]))[0]) if action else None
    return StatusEntry(state, step, code, peer, NOW - ago)


def rank(number: int, *notes: StatusEntry, process: str = "running", failure: str = "") -> RankStatus:
    return RankStatus(number, 1000 + number, process, notes, failure)


def waits(number: int, action: Action, peer: int, ago: float, *before: StatusEntry) -> RankStatus:
    return rank(number, *before, note("waiting", action, ago, peer))


def test_if_all_processes_are_gone_their_last_entries_are_explained() -> None:
    statuses = (
        rank(0, note("waiting", Recv(0, 3, 1), 9, peer=1), process="gone"),
        rank(1, note("working", Forward(1, 3), 10), process="gone"),
        rank(2, note("waiting", Recv(2, 3, 1), 8, peer=1), process="gone"),
    )
    header, culprit, *others = explain_hang(statuses, NOW).splitlines()
    assert header == "all processes are gone; their last status was:"
    assert culprit.startswith("rank 1: no progress, working on 1F3 of step 4")
    assert [line.partition(",")[0][:6] for line in others] == ["rank 0", "rank 2"]


def lines(*statuses: RankStatus) -> list[str]:
    return explain_hang(statuses, NOW).splitlines()


def test_the_chain_of_waits_ends_at_a_rank_that_works() -> None:
    assert lines(
        waits(0, Recv(0, 3, 1), 1, ago=58),
        waits(1, Recv(1, 3, 2), 2, ago=60),
        rank(2, note("working", Backward(2, 3), ago=61)),
    ) == [
        "rank 2: no progress, working on 2B3 of step 4 for 61.0 s",
        "rank 0: waiting for 0RECV_B3 of step 4 from rank 1 for 58.0 s",
        "rank 1: waiting for 1RECV_B3 of step 4 from rank 2 for 60.0 s",
    ]


def test_a_stopped_process_is_the_culprit_even_if_it_was_waiting() -> None:
    first, *_ = lines(
        rank(0, note("waiting", Recv(0, 3, 1), 9, peer=1), process="stopped"), waits(1, Recv(1, 3, 0), 0, 8)
    )
    assert first == (
        "rank 0: no progress, its process is stopped (pid 1000), "
        "last waiting for 0RECV_B3 of step 4 from rank 1 for 9.0 s"
    )


def test_a_process_that_is_gone_is_the_culprit() -> None:
    first, _ = lines(rank(0, note("working", Forward(0, 3), 9), process="gone"), waits(1, Recv(1, 3, 0), 0, 8))
    assert first == "rank 0: no progress, its process is gone (pid 1000), last working on 0F3 of step 4 for 9.0 s"


def test_a_failed_rank_is_the_culprit() -> None:
    failed = rank(0, note("working", Forward(0, 3), 9), failure=ErrorReport(0, "KeyError: 'a'").to_json())
    assert lines(failed, waits(1, Recv(1, 3, 0), 0, 8))[0] == (
        "rank 0: no progress, failed in 0F3 of step 4: KeyError: 'a'"
    )


def test_a_rank_that_failed_because_it_waited_is_not_the_culprit() -> None:
    timed_out = rank(
        1, note("waiting", Recv(1, 3, 2), 9, peer=2), failure=ErrorReport(1, "RunError: in vain").to_json()
    )
    stopped = rank(2, note("working", Backward(2, 3), 9), process="stopped")
    first, second, third = lines(waits(0, Recv(0, 3, 1), 1, 8), timed_out, stopped)
    assert first.startswith("rank 2: no progress, its process is stopped")
    assert second.startswith("rank 0: waiting")
    assert third == "rank 1: failed in 1RECV_B3 of step 4: RunError: in vain"


def test_a_message_that_was_sent_and_not_received_is_lost() -> None:
    sender = rank(0, note("working", Send(0, 3, 1), 7), note("idle", ago=6))
    first, second = lines(sender, waits(1, Recv(1, 3, 0), 0, 8))
    assert first == (
        "rank 0: sent 0SEND_F3 of step 4 7.0 s ago, but rank 1 has not received it: the message was lost; "
        "now between steps for 6.0 s, after step 4"
    )
    assert second == "rank 1: waiting for 1RECV_F3 of step 4 from rank 0 for 8.0 s"


def test_a_message_of_another_step_is_not_the_one_awaited() -> None:
    sender = rank(0, note("working", Send(0, 3, 1), 7, step=3), note("idle", ago=6))
    assert lines(sender, waits(1, Recv(1, 3, 0), 0, 8))[0] == (
        "rank 0: has not sent the message that rank 1 is waiting for, between steps for 6.0 s, after step 4"
    )


def test_a_rank_that_has_ended_sends_nothing_more() -> None:
    gone = rank(0, note("ended", ago=3), process="gone")
    assert lines(gone, waits(1, Recv(1, 3, 0), 0, 8))[0] == (
        "rank 0: has not sent the message that rank 1 is waiting for, finished 3.0 s ago"
    )


def test_a_cycle_of_waits_is_reported_once() -> None:
    first, *rest = lines(waits(0, Recv(0, 1, 1), 1, 8), waits(1, Recv(1, 3, 0), 0, 9), waits(2, Recv(2, 3, 1), 1, 7))
    assert first.startswith("rank 1 -> rank 0 -> rank 1: waiting for each other, so a message was lost")
    assert [line.split(":")[0] for line in rest] == ["rank 0", "rank 2"]


def test_a_send_that_is_not_received_is_reported_as_such() -> None:
    first, second = lines(waits(0, Send(0, 3, 1), 1, 9), rank(1, note("working", Forward(1, 0), 10)))
    assert first == "rank 1: no progress, working on 1F0 of step 4 for 10.0 s"
    assert second == "rank 0: waiting for 0SEND_F3 of step 4 to reach rank 1 for 9.0 s"


def test_if_no_rank_waits_the_slowest_is_named_first() -> None:
    slow = rank(1, note("working", Forward(1, 0), 30))
    assert lines(rank(0, note("working", Forward(0, 0), 2)), slow)[0].startswith("rank 1: no progress")


def syncs(number: int, name: str, ago: float, step: int = 4) -> RankStatus:
    return rank(number, StatusEntry("syncing", step, sync_point_code(name), None, NOW - ago))


def test_a_rank_that_does_not_reach_a_sync_is_named_with_the_step_of_the_sync() -> None:
    assert lines(syncs(0, "step", 9, step=5), rank(1, note("idle", ago=10)), syncs(2, "step", 8, step=5)) == [
        "rank 1: has not reached the start of step 5, between steps for 10.0 s, after step 4",
        "rank 0: waiting for all ranks at the start of step 5 for 9.0 s",
        "rank 2: waiting for all ranks at the start of step 5 for 8.0 s",
    ]


def test_a_rank_that_still_prepares_its_batch_has_not_reached_the_sync() -> None:
    preparing = rank(1, note("preparing", ago=10, step=5))
    assert lines(syncs(0, "step", 9, step=5), preparing)[0] == (
        "rank 1: has not reached the start of step 5, preparing step 5 for 10.0 s"
    )


def test_a_sync_that_waits_for_a_waiting_rank_is_followed_to_the_end_of_the_chain() -> None:
    statuses = [
        syncs(0, "the end of step", 7),
        waits(1, Recv(1, 3, 2), 2, 8),
        rank(2, note("working", Backward(2, 3), ago=9)),
    ]
    assert lines(*statuses)[0] == "rank 2: no progress, working on 2B3 of step 4 for 9.0 s"


def test_a_stopped_rank_is_the_culprit_even_inside_a_sync() -> None:
    stopped = rank(1, *syncs(1, "clip_grad_norm_", 9).recent, process="stopped")
    assert lines(syncs(0, "clip_grad_norm_", 8), stopped)[0] == (
        "rank 1: no progress, its process is stopped (pid 1001), "
        "last waiting for all ranks at clip_grad_norm_ before step 4 for 9.0 s"
    )


def test_an_unknown_sync_point_has_a_description() -> None:
    assert lines(syncs(0, "a call of tomorrow", 8), rank(1, note("idle", ago=9)))[0].startswith(
        "rank 1: has not reached a call before step 4"
    )


def test_a_rank_without_a_status_file_is_reported() -> None:
    assert lines(waits(0, Recv(0, 3, 1), 1, 9), RankStatus(1))[0] == (
        "rank 1: no status on this host, and rank 0 is waiting for it"
    )


def test_several_culprits_are_all_named_before_the_others() -> None:
    statuses = [
        waits(0, Recv(0, 3, 1), 1, 9),
        rank(1, note("working", Forward(1, 0), 10)),
        waits(2, Recv(2, 3, 3), 3, 8),
        rank(3, note("working", Forward(3, 0), 10)),
    ]
    assert [line.split(":")[0] for line in lines(*statuses)] == ["rank 1", "rank 3", "rank 0", "rank 2"]


def test_no_ranks_give_an_empty_report() -> None:
    assert lines() == []


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_an_error_that_cannot_say_its_text_is_reported() -> None:
    report = ErrorReport.of(SilentError(), 1)
    assert report.summary == "SilentError: <no text: its __str__ raised RuntimeError>"
    assert not report.follows


def test_a_long_text_is_cut() -> None:
    report = ErrorReport.of(ValueError("x" * 5_000_000), 0)
    assert len(report.summary) < 600
    assert len(report.to_json(1 << 16)) <= 1 << 16
