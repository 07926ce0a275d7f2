"""A limit on file sizes, or a full disk, ends a training with one message."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.short_training import COMMAND, ShortTraining
from penstock.errors import RunError
from penstock.launch import StatusFile

RUN_FAILED = 5


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """As `ulimit -f`; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", os.fspath(mount)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        is_mounted = False
    if not is_mounted:
        pytest.skip("mounting needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", os.fspath(mount)], check=True)


def test_a_status_file_beyond_the_limit_of_file_sizes_is_one_error(tmp_path: Path) -> None:
    with limited_files(1024), pytest.raises(RunError, match=r"File too large.*\ntry: .*ulimit -f"):
        StatusFile.create(tmp_path, 0, 1)


def test_a_status_file_on_a_full_disk_is_one_error(small_disk: Path) -> None:
    with pytest.raises(RunError, match="No space left on device"):
        StatusFile.create(small_disk, 0, 1)


def message(training: ShortTraining, *options: object) -> str:
    """The output of a training that fails."""
    code, output = training.call(*COMMAND, "--steps", 2, *options)
    assert code == RUN_FAILED, output
    assert "Traceback" not in output
    return output


@pytest.mark.whole
def test_training_under_a_limit_of_file_sizes_ends_with_one_message(training: ShortTraining, tmp_path: Path) -> None:
    with limited_files(1024):
        assert "too large" in message(training, "--out", tmp_path / "out")


@pytest.mark.whole
def test_training_with_results_on_a_full_disk_ends_with_one_message(training: ShortTraining, small_disk: Path) -> None:
    assert "no space left on device" in message(training, "--out", small_disk / "out").lower()


@pytest.mark.whole
def test_training_with_a_full_scratch_directory_ends_with_one_message(
    training: ShortTraining, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SCRATCH", os.fspath(small_disk))
    assert "no space left on device" in message(training).lower()
