"""Watch: broken waits become errors with words, and no rank waits for the dead."""

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
from penstock.launch import VARIABLE, Board, Watch, launch, occasion_code
from penstock.launch import watch as watch_module
from penstock.launch.contact import Loss, follows_another, loss_of

pytestmark = pytest.mark.usefixtures("tidy")
STEP, DEADLINE_SECONDS = 4, 0.5
FORWARD, SEND, RECEIVE = (int(code) for code in encode([Forward(0, 3), Send(0, 3, 1), Recv(1, 3, 0)]))
Role = Callable[[Board], None]


def exchange(first: Role, ranks: int = 2) -> str:
    """The error of a launch in which rank 0 plays a role and every other one waits for its left neighbour's message."""

    def run() -> None:
        rank = dist.get_rank()
        board = Board.create(os.environ[VARIABLE], rank, ranks)
        watch = Watch(board, DEADLINE_SECONDS, range(ranks))
        dist.barrier()
        if rank == 0:
            first(board)
        else:
            receive(board, watch, rank - 1)

    with pytest.raises(RunError) as caught:
        launch(run, ranks, timeout=20)
    return str(caught.value)


def receive(board: Board, watch: Watch, peer: int) -> None:
    """As a pipeline receives."""
    board.waiting(STEP, RECEIVE, peer)
    try:
        dist.irecv(torch.zeros(4), peer).wait(timedelta(seconds=DEADLINE_SECONDS))
    except RuntimeError as error:
        raise watch.lost(RECEIVE, peer, error) from error
    board.idle(STEP)


def test_a_stopped_rank_is_named_by_who_waits_for_it() -> None:
    def stop(board: Board) -> None:
        board.working(STEP, FORWARD)
        os.kill(os.getpid(), signal.SIGSTOP)

    message = exchange(stop)
    assert message.startswith("a rank failed (rank: 1, step: 4, stage: 1, microbatch: 3, action: 1RECV_F3)\n")
    assert "rank 1 waited in vain for 1RECV_F3 of rank 0 (step: 4, stage: 1" in message
    assert "\nrank 0: did not move, its process is stopped (pid " in message
    assert "last working on 0F3 of step 4 for 0." in message


def test_an_endless_loop_is_found_at_the_end_of_the_chain() -> None:
    def loop(board: Board) -> None:
        board.working(STEP, FORWARD)
        while True:
            pass

    message = exchange(loop, ranks=3)
    assert "\nrank 0: did not move, working on 0F3 of step 4 for 0." in message


def test_a_lost_message_is_told_by_what_the_sender_noted() -> None:
    def lose(board: Board) -> None:
        board.working(STEP, SEND)
        board.idle(STEP)
        time.sleep(20)

    assert "\nrank 0: sent 0SEND_F3 of step 4 0." in exchange(lose)


def test_a_message_that_was_never_sent_is_told() -> None:
    def forget(board: Board) -> None:
        board.idle(STEP)
        time.sleep(20)

    assert "\nrank 0: does not send what rank 1 waits for, between steps for 0." in exchange(forget)


def lost_contact(first: Role, place: Path) -> str:
    """What rank 1 says when rank 0 goes away; both write it down, because the launcher shows the cause first."""

    def run() -> None:
        rank = dist.get_rank()
        board = Board.create(os.environ[VARIABLE], rank, 2)
        dist.barrier()
        if rank == 0:
            board.working(STEP, FORWARD)
            first(board)
        try:
            receive(board, Watch(board, 10, (0, 1)), 0)
        except RunError as error:
            place.write_text(str(error))
            raise

    with pytest.raises(RunError):
        launch(run, 2, timeout=20)
    return place.read_text()


def test_a_rank_that_goes_away_with_a_reason_takes_it_along(tmp_path: Path) -> None:
    def fail(board: Board) -> None:
        board.failed("out of luck")
        os._exit(1)

    place = "step: 4, stage: 1, microbatch: 3, action: 1RECV_F3"
    assert lost_contact(fail, tmp_path / "told").splitlines() == [
        f"rank 1 lost contact with rank 0 while waiting for 1RECV_F3 ({place})",
        "rank 0: failed in 0F3 of step 4: out of luck",
    ]


def test_a_killed_rank_is_told_to_be_gone(tmp_path: Path) -> None:
    told = lost_contact(lambda board: os.kill(os.getpid(), signal.SIGKILL), tmp_path / "told")
    assert told.splitlines()[1].startswith("rank 0: its process is gone (pid ")


# ---------------------------------------------------------------------------------------- a rank that does not notice


def beside(broken: Role, starts: bool = True) -> tuple[str, float]:
    """The launcher's error when rank 1 does something else while rank 0 breaks, and how long that took."""

    def run() -> None:
        board = Board.create(os.environ[VARIABLE], dist.get_rank(), 2)
        dist.barrier()
        if dist.get_rank() == 0:
            board.working(STEP, FORWARD)
            broken(board)
        if starts:
            Watch(board, DEADLINE_SECONDS, (0, 1)).start()
        time.sleep(3)

    begin = time.monotonic()
    with pytest.raises(RunError) as caught:
        launch(run, 2, timeout=20)
    return str(caught.value), time.monotonic() - begin


def test_a_rank_that_does_not_notice_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(board: Board) -> None:
        board.failed("out of luck")
        time.sleep(10)

    message, seconds = beside(fail)
    reason = "rank 1 stopped, because rank 0 failed: out of luck"
    assert message == f"out of luck (rank: 0, step: 4, action: 0F3)\nrank 1: failed too: {reason}"
    assert capfd.readouterr().err == f"penstock: {reason}\n"
    assert 1 < seconds < 10


def test_a_watch_that_was_not_started_leaves_the_process_alone() -> None:
    def fail(board: Board) -> None:
        board.failed("out of luck")
        time.sleep(1.6)
        os._exit(3)

    message, seconds = beside(fail, starts=False)
    assert message.splitlines() == ["out of luck (rank: 0, step: 4, action: 0F3)", "rank 1: stopped"]
    assert seconds > 1.6


def test_a_rank_that_ended_between_steps_is_no_trouble(tmp_path: Path) -> None:
    board = Board.create(tmp_path, 0, 2)
    assert Watch(board, 1, (0, 1)).trouble() == ""
    other = os.fork()
    if other == 0:
        Board.create(tmp_path, 1, 2).idle(STEP)
        os._exit(0)
    os.waitpid(other, 0)
    assert Watch(board, 1, (0, 1)).trouble() == ""


def test_a_rank_that_died_in_a_step_is_trouble(tmp_path: Path) -> None:
    board = Board.create(tmp_path, 0, 2)
    other = os.fork()
    if other == 0:
        Board.create(tmp_path, 1, 2).working(STEP, FORWARD)
        os._exit(0)
    os.waitpid(other, 0)
    assert Watch(board, 1, (0, 1)).trouble().startswith("rank 1: its process is gone")


def ended(directory: Path) -> None:
    """Rank 1 has done all its work, and its process is still there."""
    other = Board.create(directory, 1, 2)
    other.idle(STEP)
    other.ended()


def test_a_rank_that_has_ended_is_missed_by_who_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.create(tmp_path, 0, 2)
    watch = Watch(board, 1, (0, 1))
    ended(tmp_path)
    board.meeting(STEP + 1, occasion_code("step"))
    assert watch.desertion() == ""
    monkeypatch.setattr(watch_module, "_PATIENCE_SECONDS", 0.0)
    assert watch.desertion() == "rank 1 had done all its work before the beginning of step 5"
    board.waiting(STEP + 1, RECEIVE, 1)
    assert watch.desertion() == "rank 1 had done all its work before 1RECV_F3 of step 5"
    board.working(STEP + 1, FORWARD)
    assert watch.desertion() == ""


# -------------------------------------------------------------------------------------------------------- recognition


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("[/x/unbound_buffer.cc:78] Timed out waiting 500ms for recv operation to complete", Loss.TIMEOUT),
        ("[/x/unbound_buffer.cc:129] Timed out waiting 500ms for send operation to complete", Loss.TIMEOUT),
        ("Operation timed out!", Loss.TIMEOUT),
        ("Application timeout caused pair closure", Loss.TIMEOUT),
        ("[/x/pair.cc:553] Connection closed by peer [127.0.0.1]:49355. This is typically caused by a", Loss.CLOSED),
        ("[/x/pair.cc:537] Read error [127.0.0.1]:30609: Connection reset by peer. This is", Loss.CLOSED),
        ("writev [127.0.0.1]:2: Broken pipe", Loss.CLOSED),
        ("Read error [10.0.0.2]:30609: Connection timed out", Loss.TIMEOUT),
        ("tensors must be contiguous", Loss.OTHER),
    ],
)
def test_the_words_of_a_broken_wait_are_recognised(text: str, loss: Loss) -> None:
    assert loss_of(RuntimeError(text)) is loss


def test_an_unknown_error_keeps_its_words(tmp_path: Path) -> None:
    watch = Watch(Board.create(tmp_path, 1, 2), 1, (0, 1))
    message = str(watch.lost(RECEIVE, 0, RuntimeError("strange")))
    assert message.startswith("rank 1 lost the message 1RECV_F3 of rank 0 (step: 0")
    assert "reason: RuntimeError: strange" in message


def test_an_error_that_follows_from_a_closed_connection_is_known_as_such() -> None:
    cause = RuntimeError("Connection closed by peer")
    error = RunError("lost contact")
    error.__cause__ = cause
    assert follows_another(error)
    assert not follows_another(ConnectionResetError("Connection reset by peer"))
    assert not follows_another(RuntimeError("Operation timed out!"))
