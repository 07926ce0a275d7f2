"""Readers beside a writer: nothing is removed that a process reads or writes, and what vanishes is skipped."""

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.concurrent_checkpoints import concurrent_checkpoints
from penstock.checkpoint import (
    CheckpointDir,
    CheckpointReader,
    CheckpointWriter,
    VanishedError,
    find_checkpoints,
    locks,
    verify_checkpoints,
    writer,
)
from penstock.checkpoint.locks import lock_exclusively, lock_shared
from penstock.errors import CheckpointError
from tests.checkpoint.trainings import saved


@pytest.mark.parametrize("keep", [1, 2])
def test_loads_and_verifications_beside_saves_do_not_fail(keep: int) -> None:
    lines = list(concurrent_checkpoints(keep, saves=20, loads=20, verifies=20).lines)
    assert [line.cells[0] for line in lines if not line.passes] == []
    assert {line.cells[0] for line in lines} == {"saves", "loads", "verifies"}


@pytest.mark.whole
@pytest.mark.parametrize("keep", [1, 2])
def test_thousands_of_them_do_not_fail(keep: int) -> None:
    assert concurrent_checkpoints(keep).show().passes


def test_a_checkpoint_is_not_pruned_while_it_is_read(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    with CheckpointReader(tmp_path / "step-000001") as opened:
        training.save(tmp_path, keep=1, step=2)
        assert opened.verify() > 0
    training.save(tmp_path, keep=1, step=3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_reported_as_vanished(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    with CheckpointReader(tmp_path / "step-000001") as opened:
        training.save(tmp_path, extra="again", step=1)
        with pytest.raises(VanishedError):
            opened.verify()
        assert [path.name[:15] for path in tmp_path.iterdir() if path.name.startswith(".")] == [".discarded-repl"]
    training.save(tmp_path, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_load_reads_the_next_one_if_the_newest_vanishes_at_any_moment(tmp_path: Path) -> None:
    training = saved(tmp_path, 1, 2)

    def removing(function: Any, times: list[int]) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            times[0] -= 1
            if times[0] == 0:
                shutil.rmtree(tmp_path / "step-000002")
            return function(*args, **kwargs)

        return called

    for name in (
        "loading.lock_shared",
        "reader.lock_shared",
        "reader.read_manifest",
        "reader.check_digests",
        "reader.safe_open",
    ):
        for count in (1, 2, 3):
            if not (tmp_path / "step-000002").exists():
                training.save(tmp_path, step=2)
            module, _, attribute = name.partition(".")
            target = __import__(f"penstock.checkpoint.{module}", fromlist=["x"])
            with mock.patch.object(target, attribute, removing(getattr(target, attribute), [count])):
                loaded = training.pipe.load(tmp_path, training.optimizer)
            assert loaded.step == (2 if (tmp_path / "step-000002").exists() else 1), (name, count)


def test_verify_leaves_out_what_was_removed_meanwhile(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)

    def shared(path: Path) -> Any:
        if path.name == "step-000002":
            shutil.rmtree(path, ignore_errors=True)
        return lock_shared(path)

    with mock.patch("penstock.checkpoint.reader.lock_shared", shared):
        assert [(found.name, found.problem) for found in verify_checkpoints(tmp_path)] == [("step-000001", "")]


def test_a_temporary_directory_that_is_removed_before_it_is_locked_is_made_again(tmp_path: Path) -> None:
    removed = []

    def lock(path: Path) -> Any:
        if not removed:
            removed.extend(CheckpointDir(tmp_path).clean_up())
        return lock_exclusively(path)

    with mock.patch.object(writer, "lock_exclusively", lock):
        made = CheckpointWriter.create(tmp_path, 1, 1)
    assert len(removed) == 1
    assert made.path.exists()
    assert CheckpointDir(tmp_path).clean_up() == []
    made.abandon()


def test_without_locks_checkpoints_are_pruned_and_unknown_temporary_directories_stay(tmp_path: Path) -> None:
    with mock.patch.object(locks.fcntl, "flock", side_effect=OSError(9, "Bad file descriptor")):
        training = saved(tmp_path, 1)
        (tmp_path / ".tmp-step-000009-00000000").mkdir()
        training.save(tmp_path, keep=1, step=2)
        assert training.pipe.load(tmp_path).step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-step-000009-00000000", "step-000002"]


def test_a_checkpoint_that_is_named_and_gone_is_an_error(tmp_path: Path) -> None:
    training = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="no such directory"):
        training.pipe.load(tmp_path / "step-000002")


def test_a_listing_that_sees_only_what_is_gone_meanwhile_is_repeated(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    gone, there = tmp_path / "step-000000", tmp_path / "step-000002"
    with mock.patch.object(Path, "iterdir", side_effect=[iter([gone]), iter([gone]), iter([there])]):
        assert find_checkpoints(tmp_path) == [there]
