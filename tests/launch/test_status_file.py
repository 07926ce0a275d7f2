"""Other processes read what a rank recorded, while it runs and after it has died."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import penstock
from penstock.ir import Forward, Recv, encode
from penstock.launch import (
    MAX_FAILURE_BYTES,
    STATUS_DIR_VARIABLE,
    ErrorReport,
    RankStatus,
    StatusFile,
    launch,
    scratch,
    shared_status_directory,
    sync_point_code,
)
from penstock.launch.reports import summary_of
from penstock.launch.status_file import NUM_RECENT
from tests.leftovers import wait_until

pytestmark = pytest.mark.usefixtures("tidy")
FORWARD, RECEIVE = (int(code) for code in encode([Forward(1, 3), Recv(1, 3, 0)]))


def in_another_process(fn: Callable[[], None]) -> int:
    process = get_context("fork").Process(target=fn)
    process.start()
    process.join()
    return process.exitcode or 0


def only(directory: Path) -> RankStatus:
    (status,) = StatusFile.read(directory)
    return status


def test_a_working_rank_is_read(tmp_path: Path) -> None:
    before = time.monotonic()
    StatusFile.create(tmp_path, 0, 1).working(4, FORWARD)
    status = only(tmp_path)
    assert (status.state, status.now.step, status.now.action, status.now.peer) == ("working", 4, "1F3", None)
    assert (status.pid, status.process, status.failure) == (os.getpid(), "running", "")
    assert before <= status.now.since <= time.monotonic()


def test_a_waiting_rank_names_its_peer(tmp_path: Path) -> None:
    StatusFile.create(tmp_path, 0, 1).waiting(4, RECEIVE, 2)
    status = only(tmp_path)
    assert (status.state, status.now.action, status.now.peer) == ("waiting", "1RECV_F3", 2)


def test_a_rank_between_steps_has_no_action(tmp_path: Path) -> None:
    StatusFile.create(tmp_path, 0, 1).idle(5)
    status = only(tmp_path)
    assert (status.state, status.now.step, status.now.action) == ("idle", 5, "")


def test_a_rank_that_prepares_a_step_names_the_step(tmp_path: Path) -> None:
    status_file = StatusFile.create(tmp_path, 0, 1)
    status_file.idle(5)
    status_file.preparing(6)
    assert (only(tmp_path).state, only(tmp_path).now.step, status_file.now.step) == ("preparing", 6, 6)


def test_a_syncing_rank_names_the_sync_point(tmp_path: Path) -> None:
    StatusFile.create(tmp_path, 0, 1).syncing(6, sync_point_code("the end of step"))
    assert (only(tmp_path).state, only(tmp_path).now.action) == ("syncing", "")
    assert only(tmp_path).now.sync_point == "the end of step 6"


def test_every_sync_of_the_package_is_named_in_reports() -> None:
    sources = Path(penstock.__file__).parent.rglob("*.py")
    names = {name for source in sources for name in re.findall(r'SyncRequest\("([^"]+)"', source.read_text("utf-8"))}
    assert {"step", "save", "check_optimizer", "forward_backward"} <= names
    assert [name for name in sorted(names) if sync_point_code(name) == sync_point_code("unknown")] == []


def test_a_new_file_is_started_and_a_missing_one_absent(tmp_path: Path) -> None:
    StatusFile.create(tmp_path, 1, 3)
    assert [status.state for status in StatusFile.read(tmp_path)] == ["absent", "started", "absent"]


def test_files_that_are_missing_or_not_status_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "rank00000.status").write_bytes(b"short")
    assert StatusFile.read(tmp_path) == ()
    assert StatusFile.read(tmp_path / "nowhere") == ()


def test_the_last_entries_are_kept_in_order(tmp_path: Path) -> None:
    status_file = StatusFile.create(tmp_path, 0, 1)
    for step in range(NUM_RECENT + 50):
        status_file.working(step, FORWARD)
    recent = only(tmp_path).recent
    assert [entry.step for entry in recent] == list(range(50, NUM_RECENT + 50))
    assert sorted(entry.since for entry in recent) == [entry.since for entry in recent]


def test_the_file_of_a_killed_rank_is_readable(tmp_path: Path) -> None:
    def killed() -> None:
        StatusFile.create(tmp_path, 0, 1).waiting(4, RECEIVE, 2)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_another_process(killed) == -signal.SIGKILL
    assert (only(tmp_path).now.action, only(tmp_path).process) == ("1RECV_F3", "gone")


def test_a_stopped_rank_is_seen(tmp_path: Path) -> None:
    process = get_context("fork").Process(target=lambda: (StatusFile.create(tmp_path, 0, 1), signal.pause()))
    process.start()
    try:
        wait_until(lambda: StatusFile.read(tmp_path))
        os.kill(process.pid or 0, signal.SIGSTOP)
        wait_until(lambda: only(tmp_path).process == "stopped")
    finally:
        process.kill()
        process.join()


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    StatusFile.create(tmp_path, 0, 1)
    path = tmp_path / "rank00000.status"
    data = bytearray(path.read_bytes())
    data[32] ^= 1  # the start of the process
    path.write_bytes(data)
    assert only(tmp_path).process == "gone"


def test_the_same_process_continues_the_file_and_another_one_starts_over(tmp_path: Path) -> None:
    StatusFile.create(tmp_path, 0, 1).working(1, FORWARD)
    StatusFile.create(tmp_path, 0, 1).working(2, FORWARD)
    assert [entry.step for entry in only(tmp_path).recent] == [0, 1, 2]
    in_another_process(lambda: StatusFile.create(tmp_path, 0, 1).working(7, FORWARD))
    assert [entry.step for entry in only(tmp_path).recent] == [0, 7]


def test_opening_the_file_twice_in_one_process_shares_it(tmp_path: Path) -> None:
    first, second = StatusFile.create(tmp_path, 0, 1), StatusFile.create(tmp_path, 0, 1)
    for step in range(9):
        second.working(step, FORWARD)
    first.ended()
    assert (only(tmp_path).state, only(tmp_path).now.step) == ("ended", 8)


def test_interleaved_writers_of_one_process_do_not_hide_entries(tmp_path: Path) -> None:
    first, second = StatusFile.create(tmp_path, 0, 1), StatusFile.create(tmp_path, 0, 1)
    for step in range(9):
        first.working(step, FORWARD)
    second.working(20, FORWARD)
    assert only(tmp_path).now.step == 20


def test_a_torn_entry_is_skipped(tmp_path: Path) -> None:
    status_file = StatusFile.create(tmp_path, 0, 1)
    status_file.working(1, FORWARD)
    status_file.working(2, FORWARD)
    path = tmp_path / "rank00000.status"
    data = bytearray(path.read_bytes())
    data[64 + 3 * 48 + 40] ^= 255  # the second sequence number of the third entry
    path.write_bytes(data)
    assert only(tmp_path).now.step == 1


def test_a_reader_never_sees_half_an_entry(tmp_path: Path) -> None:
    def writes() -> None:
        status_file = StatusFile.create(tmp_path, 0, 1)
        for number in range(1 << 30):
            status_file.waiting(number, number, number & 0xFFFF)

    process = get_context("fork").Process(target=writes)
    process.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            for status in StatusFile.read(tmp_path):
                assert all(m.step == m.code and m.peer == m.step & 0xFFFF for m in status.recent[1:])
    finally:
        process.kill()
        process.join()


def test_an_invalid_action_code_is_shown_as_a_number(tmp_path: Path) -> None:
    StatusFile.create(tmp_path, 0, 1).working(1, 15)
    assert only(tmp_path).now.action == "code 15"


def test_the_files_of_an_earlier_run_can_be_cleared(tmp_path: Path) -> None:
    StatusFile.create(tmp_path, 0, 1)
    StatusFile.clear(tmp_path)
    assert StatusFile.read(tmp_path) == ()


# ----------------------------------------------------------------------------------------------------------- failures


def test_the_first_failure_is_kept_until_it_is_cleared(tmp_path: Path) -> None:
    status_file = StatusFile.create(tmp_path, 0, 1)
    status_file.working(4, FORWARD)
    status_file.failed("first")
    status_file.failed("second")
    assert (only(tmp_path).state, only(tmp_path).failure, only(tmp_path).now.action) == ("failed", "first", "1F3")
    status_file.recovered()
    assert only(tmp_path).state == "working"


def test_a_failure_that_is_too_long_is_cut_between_characters(tmp_path: Path) -> None:
    StatusFile.create(tmp_path, 0, 1).failed("x" + "é" * MAX_FAILURE_BYTES)
    assert set(only(tmp_path).failure) == {"x", "é"}


def test_a_long_traceback_loses_its_middle_and_stays_json(tmp_path: Path) -> None:
    failure = ErrorReport(3, "KeyError: 'a'", "begin\n" + '  File "é"\n' * 9000 + "end", {"step": "4"})
    StatusFile.create(tmp_path, 0, 1).failed(failure.to_json(MAX_FAILURE_BYTES))
    failure = json.loads(only(tmp_path).failure)
    assert failure["text"].startswith("begin\n")
    assert failure["text"].endswith("end")
    assert (failure["rank"], failure["location"]) == (3, {"step": "4"})


def test_any_failure_text_has_a_summary() -> None:
    assert summary_of(ErrorReport(0, "KeyError: 'a'").to_json()) == "KeyError: 'a'"
    assert summary_of("plain\ntext") == "plain"
    assert summary_of('{"other": 1}') == '{"other": 1}'


# - shared directory


def test_launched_ranks_use_the_directory_of_the_launcher() -> None:
    first, second = launch(lambda: (str(shared_status_directory()), os.environ[STATUS_DIR_VARIABLE]), 2)
    assert first == second == (first[1], first[1])


def test_other_ranks_agree_on_a_directory_that_is_removed_when_they_end(
    tidy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A forked process leaves without exit handlers, and has those of the test process, which it must not run.
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(scratch, "atexit", SimpleNamespace(register=at_exit.append))

    def run_as_a_rank() -> tuple[Path, list[str]]:
        del os.environ[STATUS_DIR_VARIABLE]
        directory = shared_status_directory()
        assert shared_status_directory() == directory  # not another one, with a process that removes it
        StatusFile.create(directory, dist.get_rank(), 3)
        dist.barrier()
        states = [status.state for status in StatusFile.read(directory)]
        dist.barrier()
        for remove in at_exit:
            remove()
        return directory, states

    results = launch(run_as_a_rank, 3, timeout=60.0)
    assert len({directory for directory, _ in results}) == 1
    assert results[0][0].parent == tidy
    assert results[2][1] == ["started"] * 3


def test_a_process_with_a_directory_of_its_own_can_launch_ranks(tidy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(scratch, "atexit", SimpleNamespace(register=at_exit.append))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shared_status_directory()
    dist.destroy_process_group()

    def run_as_a_rank() -> bool:
        del os.environ[STATUS_DIR_VARIABLE]
        exists = shared_status_directory().exists()  # must not free the group of the parent: it would wait for ever
        at_exit[-1]()
        return exists

    assert launch(run_as_a_rank, 1, timeout=60.0) == [True]
    at_exit[0]()
