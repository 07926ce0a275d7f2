"""The private directory: in memory where there is room, gone when its owner is."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.launch import scratch


def test_it_is_in_memory_where_the_system_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_IN_MEMORY", tmp_path)
    with scratch.scratch_directory() as directory:
        assert directory.parent == tmp_path
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_it_is_a_temporary_directory_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_IN_MEMORY", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scratch.scratch_directory() as directory:
        assert directory.parent == tmp_path


@pytest.mark.parametrize("ending", ["sys.exit()", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_directory_is_removed_at_the_end_of_its_process_however_that_ends(ending: str, tmp_path: Path) -> None:
    directory = tmp_path / "there"
    directory.mkdir()
    (directory / "rank00000.board").touch()
    code = "import os, sys; from pathlib import Path; from penstock.launch.scratch import remove_at_end"
    subprocess.run([sys.executable, "-c", f"{code}; remove_at_end(Path({str(directory)!r})); {ending}"], check=False)
    end = time.monotonic() + 30
    while directory.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not directory.exists()
