"""Tests of processes have a deadline and a temporary directory of their own, and leave no process and no file."""

import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.launch import scratch

DEADLINE_SECONDS = 300


@contextmanager
def nothing_left(directory: Path) -> Iterator[None]:
    """Make the directory the one for temporary files; in the end it must be empty, and all child processes gone."""
    directory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        patch.setattr(scratch, "_IN_MEMORY", directory)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        before = children()
        signal.alarm(DEADLINE_SECONDS)
        yield
        signal.alarm(0)
    assert children() <= before
    assert list(directory.iterdir()) == []


@pytest.fixture
def tidy(tmp_path: Path) -> Iterator[Path]:
    """The directory for temporary files of a test that must leave no file and no process."""
    directory = tmp_path / "temporary"
    with nothing_left(directory):
        yield directory


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds; generous, so that a busy machine only makes the test slower."""
    end = time.monotonic() + DEADLINE_SECONDS / 2
    while not condition():
        assert time.monotonic() < end, "the condition was never met"
        time.sleep(0.01)


def children() -> set[int]:
    """The processes that this one has started and that are not reaped, zombies among them."""
    pids = {pid for task in Path("/proc/self/task").glob("*/children") for pid in read_or_empty(task).split()}
    return {int(pid) for pid in pids if not is_pythons_own(pid)}


def read_or_empty(path: Path) -> str:
    """The text of a file in /proc; empty if its thread or process has ended meanwhile."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_pythons_own(pid: str) -> bool:
    """Whether this is the helper that multiprocessing starts once and keeps until its process ends."""
    return "multiprocessing.resource_tracker" in read_or_empty(Path(f"/proc/{pid}/cmdline"))
