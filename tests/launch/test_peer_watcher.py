"""Broken waits become readable errors, and no rank waits for a dead one."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.ir import Forward, Recv, Send, encode
from penstock.launch import (
    STATUS_DIR_VARIABLE,
    PeerWatcher,
    StatusFile,
    launch,
    launcher,
    peer_watcher,
    sync_point_code,
)
from penstock.launch.reports import WaitFailure, classify_wait_error, is_consequence
from tests.leftovers import wait_until

pytestmark = pytest.mark.usefixtures("tidy")
STEP, DEADLINE_SECONDS = 4, 0.5
FORWARD, SEND, RECEIVE = (int(code) for code in encode([Forward(0, 3), Send(0, 3, 1), Recv(1, 3, 0)]))
Role = Callable[[StatusFile], None]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence is waited for as long as it takes: on a busy machine a killed process takes a while to end."""
    monkeypatch.setattr(peer_watcher, "_EVIDENCE_SECONDS", 60.0)
    monkeypatch.setattr(launcher, "_SETTLE_SECONDS", 60.0)


def timed_out(record: Role, act: Callable[[], None], process: str = "running", ranks: int = 2) -> str:
    """The error of a launch in which rank 0 records something and acts, and each other rank waits for its neighbour."""

    def run() -> None:
        rank = dist.get_rank()
        status_file = StatusFile.create(os.environ[STATUS_DIR_VARIABLE], rank, ranks)
        if rank == 0:
            record(status_file)
        else:
            status_file.waiting(STEP, RECEIVE, rank - 1)
        dist.barrier()
        if rank == 0:
            act()
        wait_until(lambda: StatusFile.read(status_file.directory)[0].process == process)
        receive(PeerWatcher(status_file, DEADLINE_SECONDS, range(ranks)), rank - 1, DEADLINE_SECONDS)

    with pytest.raises(RunError) as caught:
        launch(run, ranks)
    return str(caught.value)


def receive(watcher: PeerWatcher, peer: int, seconds: float) -> None:
    """Receive as a pipeline does."""
    try:
        dist.irecv(torch.zeros(4), peer).wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        raise watcher.message_error(RECEIVE, peer, error) from error


def sleep() -> None:
    time.sleep(600)


def test_a_stopped_rank_is_named_by_the_rank_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_SETTLE_SECONDS", 0.3)  # a stopped rank never reports anything
    message = timed_out(
        lambda status_file: status_file.working(STEP, FORWARD), lambda: os.kill(os.getpid(), signal.SIGSTOP), "stopped"
    )
    assert message.startswith("a rank failed (rank: 1, step: 4, stage: 1, microbatch: 3, action: 1RECV_F3)\n")
    assert "rank 1 timed out waiting for 1RECV_F3 from rank 0 (step: 4, stage: 1" in message
    assert "\nrank 0: no progress, its process is stopped (pid " in message
    assert "last working on 0F3 of step 4 for " in message


def record_send(status_file: StatusFile) -> None:
    status_file.working(STEP, SEND)
    status_file.idle(STEP)


@pytest.mark.parametrize(
    ("record", "ranks", "words"),
    [
        (lambda status_file: status_file.working(STEP, FORWARD), 3, "no progress, working on 0F3 of step 4 for "),
        (record_send, 2, "sent 0SEND_F3 of step 4 "),
        (
            lambda status_file: status_file.idle(STEP),
            2,
            "has not sent the message that rank 1 is waiting for, between steps for ",
        ),
    ],
    ids=["endless work at the end of a chain", "a lost message", "a message that was never sent"],
)
def test_the_status_of_the_awaited_rank_explains_the_timeout(
    record: Role, ranks: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_SETTLE_SECONDS", 0.3)
    assert f"\nrank 0: {words}" in timed_out(record, sleep, ranks=ranks)


def lost_contact(first: Role, place: Path) -> str:
    """The error of rank 1 when rank 0 goes away, through a file because the launcher reports rank 0 first."""

    def run() -> None:
        rank = dist.get_rank()
        status_file = StatusFile.create(os.environ[STATUS_DIR_VARIABLE], rank, 2)
        dist.barrier()
        if rank == 0:
            status_file.working(STEP, FORWARD)
            first(status_file)
        status_file.waiting(STEP, RECEIVE, 0)
        try:
            receive(PeerWatcher(status_file, 10, (0, 1)), 0, 120)
        except RunError as error:
            place.write_text(str(error))
            raise

    with pytest.raises(RunError):
        launch(run, 2)
    return place.read_text()


def test_the_reason_of_a_rank_that_went_away_is_reported(tmp_path: Path) -> None:
    def fail(status_file: StatusFile) -> None:
        status_file.failed("out of luck")
        os._exit(1)

    place = "step: 4, stage: 1, microbatch: 3, action: 1RECV_F3"
    assert lost_contact(fail, tmp_path / "report").splitlines() == [
        f"rank 1 lost contact with rank 0 while waiting for 1RECV_F3 ({place})",
        "rank 0: failed in 0F3 of step 4: out of luck",
    ]


def test_a_killed_rank_is_reported_as_gone(tmp_path: Path) -> None:
    report = lost_contact(lambda status_file: os.kill(os.getpid(), signal.SIGKILL), tmp_path / "report")
    assert report.splitlines()[1].startswith("rank 0: its process is gone (pid ")


# ---------------------------------------------------------------------------------------- a rank that does not notice


def beside(broken: Role, starts: bool = True) -> str:
    """The launcher's error when rank 1 does something else while rank 0 fails."""

    def run() -> None:
        status_file = StatusFile.create(os.environ[STATUS_DIR_VARIABLE], dist.get_rank(), 2)
        dist.barrier()
        if dist.get_rank() == 0:
            status_file.working(STEP, FORWARD)
            broken(status_file)
        if starts:
            PeerWatcher(status_file, DEADLINE_SECONDS, (0, 1)).start()
        sleep()

    with pytest.raises(RunError) as caught:
        launch(run, 2)
    return str(caught.value)


def test_a_rank_that_does_not_notice_is_ended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_CAUSE_SECONDS", 0.3)  # rank 0 never reports anything itself

    def fail(status_file: StatusFile) -> None:
        status_file.failed("out of luck")
        sleep()

    message = beside(fail)
    reason = "rank 1 stopped because rank 0 failed: out of luck"
    assert message == f"out of luck (rank: 0, step: 4, action: 0F3)\nrank 1: also failed: {reason}"
    assert capfd.readouterr().err == f"penstock: {reason}\n"


def test_a_watcher_that_was_not_started_leaves_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(status_file: StatusFile) -> None:
        status_file.failed("out of luck")
        time.sleep(1.6)
        os._exit(3)

    monkeypatch.setattr(launcher, "_SETTLE_SECONDS", 0.3)  # rank 1 never reports anything
    message = beside(fail, starts=False)
    assert message.splitlines() == ["out of luck (rank: 0, step: 4, action: 0F3)", "rank 1: stopped"]


def test_a_rank_that_exited_between_steps_has_not_failed(tmp_path: Path) -> None:
    status_file = StatusFile.create(tmp_path, 0, 2)
    assert PeerWatcher(status_file, 1, (0, 1)).failed_peer() == ""
    other = os.fork()
    if other == 0:
        StatusFile.create(tmp_path, 1, 2).idle(STEP)
        os._exit(0)
    os.waitpid(other, 0)
    assert PeerWatcher(status_file, 1, (0, 1)).failed_peer() == ""


def test_a_rank_that_died_in_a_step_has_failed(tmp_path: Path) -> None:
    status_file = StatusFile.create(tmp_path, 0, 2)
    other = os.fork()
    if other == 0:
        StatusFile.create(tmp_path, 1, 2).working(STEP, FORWARD)
        os._exit(0)
    os.waitpid(other, 0)
    assert PeerWatcher(status_file, 1, (0, 1)).failed_peer().startswith("rank 1: its process is gone")


def test_a_rank_is_checked_for_its_death_once_it_records_nothing_new(tmp_path: Path) -> None:
    watcher = PeerWatcher(StatusFile.create(tmp_path, 0, 2), 1, (0, 1))
    StatusFile.create(tmp_path, 1, 2)
    assert watcher.failed_peer((1,)) == ""
    other = os.fork()
    if other == 0:
        StatusFile.create(tmp_path, 1, 2).working(STEP, FORWARD)
        os._exit(0)
    os.waitpid(other, 0)
    assert watcher.failed_peer((1,)) == ""
    assert watcher.failed_peer((1,)).startswith("rank 1: its process is gone")


def ended(directory: Path) -> None:
    """Rank 1 has finished, and its process still exists."""
    other = StatusFile.create(directory, 1, 2)
    other.idle(STEP)
    other.ended()


def test_a_rank_that_has_finished_is_noticed_by_a_rank_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status_file = StatusFile.create(tmp_path, 0, 2)
    watcher = PeerWatcher(status_file, 1, (0, 1))
    ended(tmp_path)
    status_file.syncing(STEP + 1, sync_point_code("step"))
    assert watcher.finished_peer() == ""
    monkeypatch.setattr(peer_watcher, "_IN_FLIGHT_SECONDS", 0.0)
    assert watcher.finished_peer() == "rank 1 finished before the start of step 5"
    status_file.waiting(STEP + 1, RECEIVE, 1)
    assert watcher.finished_peer() == "rank 1 finished before 1RECV_F3 of step 5"
    status_file.working(STEP + 1, FORWARD)
    assert watcher.finished_peer() == ""


# -------------------------------------------------------------------------------------------------------- recognition


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("[/x/unbound_buffer.cc:78] Timed out waiting 500ms for recv operation to complete", WaitFailure.TIMEOUT),
        ("[/x/unbound_buffer.cc:129] Timed out waiting 500ms for send operation to complete", WaitFailure.TIMEOUT),
        ("Operation timed out!", WaitFailure.TIMEOUT),
        ("Application timeout caused pair closure", WaitFailure.TIMEOUT),
        ("[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:49355. This is typically caused", WaitFailure.CLOSED),
        ("[/x/pair.cc:537] Read error [127.0.0.1]:30609: Connection reset by peer. This is", WaitFailure.CLOSED),
        ("writev [127.0.0.1]:2: Broken pipe", WaitFailure.CLOSED),
        ("Read error [10.0.0.2]:30609: Connection timed out", WaitFailure.TIMEOUT),
        ("tensors must be contiguous", WaitFailure.OTHER),
    ],
)
def test_the_text_of_a_broken_wait_is_classified(text: str, failure: WaitFailure) -> None:
    assert classify_wait_error(RuntimeError(text)) is failure


def test_the_text_of_an_unknown_error_is_kept(tmp_path: Path) -> None:
    watcher = PeerWatcher(StatusFile.create(tmp_path, 1, 2), 1, (0, 1))
    message = str(watcher.message_error(RECEIVE, 0, RuntimeError("strange")))
    assert message.startswith("rank 1 could not receive 1RECV_F3 from rank 0 (step: 0")
    assert "reason: RuntimeError: strange" in message


def test_the_consequence_of_a_closed_connection_is_recognised() -> None:
    cause = RuntimeError("Connection closed by peer")
    error = RunError("lost contact")
    error.__cause__ = cause
    assert is_consequence(error)
    assert not is_consequence(ConnectionResetError("Connection reset by peer"))
    assert not is_consequence(RuntimeError("Operation timed out!"))
