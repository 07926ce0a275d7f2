"""Scratch directories are in memory if there is room, and are removed with their owner."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.errors import RunError
from penstock.launch import scratch
from tests.leftovers import wait_until


def test_it_is_in_memory_if_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_IN_MEMORY", tmp_path)
    with scratch.scratch_directory() as directory:
        assert directory.parent == tmp_path
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_it_is_an_ordinary_temporary_directory_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_IN_MEMORY", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch.scratch_directory() as directory:
        assert directory.parent == tmp_path


def test_a_variable_that_names_no_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SCRATCH", str(tmp_path / "missing"))
    with pytest.raises(RunError, match=r"PENSTOCK_SCRATCH must be a directory .*missing\)\ntry: mkdir -p"):
        scratch.scratch_directory().__enter__()


ENDINGS: dict[str, Callable[[], None]] = {
    "exits": lambda: None,
    "leaves": lambda: os._exit(0),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_directory_is_removed_when_its_process_ends_however_it_ends(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "there"
    directory.mkdir()
    (directory / "rank00000.status").touch()
    # A forked process has the exit handlers of the test process, which it must not run: only that of the directory.
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(scratch, "atexit", SimpleNamespace(register=at_exit.append))
    if (pid := os.fork()) == 0:
        scratch.remove_at_exit(directory)
        ENDINGS[ending]()
        at_exit[0]()
        os._exit(0)
    os.waitpid(pid, 0)
    wait_until(lambda: not directory.exists())  # a process of its own removes it
