"""The Board: what a rank notes is read by others, while it runs and after its death."""

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.ir import Forward, Recv, encode
from penstock.launch import LARGEST_FAILURE, VARIABLE, Board, Failure, Status, launch, occasion_code, shared_directory
from penstock.launch.board import NUM_RECENT
from penstock.launch.failure import summary_of

pytestmark = pytest.mark.usefixtures("tidy")
FORWARD, RECEIVE = (int(code) for code in encode([Forward(1, 3), Recv(1, 3, 0)]))


def in_another_process(fn: Callable[[], None]) -> int:
    process = get_context("fork").Process(target=fn)
    process.start()
    process.join(20)
    return process.exitcode or 0


def only(directory: Path) -> Status:
    (status,) = Board.read(directory)
    return status


def test_a_rank_that_works_is_read(tmp_path: Path) -> None:
    before = time.monotonic()
    Board.create(tmp_path, 0, 1).working(4, FORWARD)
    status = only(tmp_path)
    assert (status.state, status.step, status.action, status.peer) == ("working", 4, "1F3", None)
    assert (status.pid, status.process, status.failure) == (os.getpid(), "running", "")
    assert before <= status.since <= time.monotonic()


def test_a_rank_that_waits_names_its_peer(tmp_path: Path) -> None:
    Board.create(tmp_path, 0, 1).waiting(4, RECEIVE, 2)
    status = only(tmp_path)
    assert (status.state, status.action, status.peer) == ("waiting", "1RECV_F3", 2)


def test_a_rank_between_steps_has_no_action(tmp_path: Path) -> None:
    Board.create(tmp_path, 0, 1).idle(5)
    status = only(tmp_path)
    assert (status.state, status.step, status.action) == ("idle", 5, "")


def test_a_rank_that_prepares_a_step_names_that_step(tmp_path: Path) -> None:
    board = Board.create(tmp_path, 0, 1)
    board.idle(5)
    board.preparing(6)
    assert (only(tmp_path).state, only(tmp_path).step, board.now.step) == ("preparing", 6, 6)


def test_a_rank_at_a_meeting_says_what_it_is_for(tmp_path: Path) -> None:
    Board.create(tmp_path, 0, 1).meeting(6, occasion_code("the end of step"))
    assert (only(tmp_path).state, only(tmp_path).action) == ("meeting", "")
    assert only(tmp_path).now.occasion == "the end of step 6"


def test_a_new_page_says_that_the_rank_started_and_a_missing_one_nothing(tmp_path: Path) -> None:
    Board.create(tmp_path, 1, 3)
    assert [status.state for status in Board.read(tmp_path)] == ["absent", "started", "absent"]


def test_there_is_nothing_to_read_where_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "rank00000.board").write_bytes(b"short")
    assert Board.read(tmp_path) == ()
    assert Board.read(tmp_path / "nowhere") == ()


def test_the_last_notes_are_kept_in_order(tmp_path: Path) -> None:
    board = Board.create(tmp_path, 0, 1)
    for step in range(NUM_RECENT + 50):
        board.working(step, FORWARD)
    recent = only(tmp_path).recent
    assert [moment.step for moment in recent] == list(range(50, NUM_RECENT + 50))
    assert sorted(moment.since for moment in recent) == [moment.since for moment in recent]


def test_a_page_outlives_a_killed_rank(tmp_path: Path) -> None:
    def killed() -> None:
        Board.create(tmp_path, 0, 1).waiting(4, RECEIVE, 2)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_another_process(killed) == -signal.SIGKILL
    assert (only(tmp_path).action, only(tmp_path).process) == ("1RECV_F3", "gone")


def test_a_stopped_rank_is_seen(tmp_path: Path) -> None:
    process = get_context("fork").Process(target=lambda: (Board.create(tmp_path, 0, 1), signal.pause()))
    process.start()
    try:
        while not Board.read(tmp_path):
            time.sleep(0.01)
        os.kill(process.pid or 0, signal.SIGSTOP)
        while only(tmp_path).process == "running":
            time.sleep(0.01)
        assert only(tmp_path).process == "stopped"
    finally:
        process.kill()
        process.join()


def test_a_number_used_again_is_another_process(tmp_path: Path) -> None:
    Board.create(tmp_path, 0, 1)
    page = tmp_path / "rank00000.board"
    data = bytearray(page.read_bytes())
    data[32] ^= 1  # the start of the process
    page.write_bytes(data)
    assert only(tmp_path).process == "gone"


def test_the_same_process_goes_on_writing_and_another_begins_anew(tmp_path: Path) -> None:
    Board.create(tmp_path, 0, 1).working(1, FORWARD)
    Board.create(tmp_path, 0, 1).working(2, FORWARD)
    assert [moment.step for moment in only(tmp_path).recent] == [0, 1, 2]
    in_another_process(lambda: Board.create(tmp_path, 0, 1).working(7, FORWARD))
    assert [moment.step for moment in only(tmp_path).recent] == [0, 7]


def test_two_boards_of_one_process_share_the_page(tmp_path: Path) -> None:
    first, second = Board.create(tmp_path, 0, 1), Board.create(tmp_path, 0, 1)
    for step in range(9):
        second.working(step, FORWARD)
    first.ended()
    assert (only(tmp_path).state, only(tmp_path).step) == ("ended", 8)


def test_boards_of_one_process_that_take_turns_do_not_hide_each_others_notes(tmp_path: Path) -> None:
    first, second = Board.create(tmp_path, 0, 1), Board.create(tmp_path, 0, 1)
    for step in range(9):
        first.working(step, FORWARD)
    second.working(20, FORWARD)
    assert only(tmp_path).step == 20


def test_a_torn_note_is_left_out(tmp_path: Path) -> None:
    board = Board.create(tmp_path, 0, 1)
    board.working(1, FORWARD)
    board.working(2, FORWARD)
    page = tmp_path / "rank00000.board"
    data = bytearray(page.read_bytes())
    data[64 + 3 * 48 + 40] ^= 255  # the second number of the third note
    page.write_bytes(data)
    assert only(tmp_path).step == 1


def test_a_reader_never_sees_half_a_note(tmp_path: Path) -> None:
    def writes() -> None:
        board = Board.create(tmp_path, 0, 1)
        for number in range(1 << 30):
            board.waiting(number, number, number & 0xFFFF)

    process = get_context("fork").Process(target=writes)
    process.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            for status in Board.read(tmp_path):
                assert all(m.step == m.code and m.peer == m.step & 0xFFFF for m in status.recent[1:])
    finally:
        process.kill()
        process.join()


def test_a_number_that_is_no_action_is_shown_as_a_number(tmp_path: Path) -> None:
    Board.create(tmp_path, 0, 1).working(1, 15)
    assert only(tmp_path).action == "code 15"


def test_the_pages_of_an_earlier_run_can_be_cleared(tmp_path: Path) -> None:
    Board.create(tmp_path, 0, 1)
    Board.clear(tmp_path)
    assert Board.read(tmp_path) == ()


# ----------------------------------------------------------------------------------------------------------- failures


def test_the_first_failure_stays_until_it_is_dealt_with(tmp_path: Path) -> None:
    board = Board.create(tmp_path, 0, 1)
    board.working(4, FORWARD)
    board.failed("first")
    board.failed("second")
    assert (only(tmp_path).state, only(tmp_path).failure, only(tmp_path).action) == ("failed", "first", "1F3")
    board.recovered()
    assert only(tmp_path).state == "working"


def test_a_text_that_is_too_long_is_cut_between_letters(tmp_path: Path) -> None:
    Board.create(tmp_path, 0, 1).failed("x" + "é" * LARGEST_FAILURE)
    assert set(only(tmp_path).failure) == {"x", "é"}


def test_a_long_traceback_loses_its_middle_and_stays_json(tmp_path: Path) -> None:
    failure = Failure(3, "KeyError: 'a'", "begin\n" + '  File "é"\n' * 9000 + "end", {"step": "4"})
    Board.create(tmp_path, 0, 1).failed(failure.to_json(LARGEST_FAILURE))
    told = json.loads(only(tmp_path).failure)
    assert told["text"].startswith("begin\n")
    assert told["text"].endswith("end")
    assert (told["rank"], told["places"]) == (3, {"step": "4"})


def test_any_text_of_a_failure_has_a_line() -> None:
    assert summary_of(Failure(0, "KeyError: 'a'").to_json()) == "KeyError: 'a'"
    assert summary_of("plain\ntext") == "plain"
    assert summary_of('{"other": 1}') == '{"other": 1}'


# ------------------------------------------------------------------------------------------------------------ meeting


def test_launched_ranks_meet_in_the_directory_of_the_launcher() -> None:
    first, second = launch(lambda: (str(shared_directory()), os.environ[VARIABLE]), 2)
    assert first == second == (first[1], first[1])


def test_other_ranks_agree_on_a_directory_that_goes_with_them(tidy: Path) -> None:
    def meet() -> tuple[Path, list[str]]:
        import atexit

        del os.environ[VARIABLE]
        directory = shared_directory()
        Board.create(directory, dist.get_rank(), 3)
        dist.barrier()
        states = [status.state for status in Board.read(directory)]
        dist.barrier()
        atexit._run_exitfuncs()  # a forked process leaves without them
        return directory, states

    results = launch(meet, 3)
    assert len({directory for directory, _ in results}) == 1
    assert results[0][0].parent == tidy
    assert results[2][1] == ["started"] * 3
