"""Scratch directories are in memory if there is room, and are removed with their owner."""

import subprocess
import sys
from pathlib import Path

import pytest

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


PROGRAM = """
import os, sys
from pathlib import Path
from penstock.launch.scratch import remove_at_exit

for directory in map(Path, sys.argv[1:]):
    if os.fork() == 0:
        remove_at_exit(directory)
        {"exits": sys.exit, "leaves": lambda: os._exit(0), "killed": lambda: os.kill(os.getpid(), 9)}[directory.name]()
"""


def test_a_directory_is_removed_when_its_process_ends_however_it_ends(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("exits", "leaves", "killed")]
    for directory in directories:
        directory.mkdir()
        (directory / "rank00000.status").touch()
    subprocess.run([sys.executable, "-c", PROGRAM, *map(str, directories)], check=True)
    wait_until(lambda: not list(tmp_path.iterdir()))
