"""A directory of checkpoints: one subdirectory per saved step, and temporary ones while they are written or removed.

    step-000100                       a complete checkpoint
    .tmp-step-000100-1a2b3c4d         one that is being written
    .replaced-step-000100             an older checkpoint of this step, while a new one gets its name
    .discarded-step-000100.1a2b3c4d   one that is being removed

A process may be killed at any moment. Names change only by renaming a directory, so that each of them means the same
before and after a crash; `clean_up` removes the rest of interrupted saves.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from penstock.checkpoint.locks import DirectoryLock, VanishedError, lock_exclusively
from penstock.checkpoint.manifest import NAME, read_manifest, step_name, step_of
from penstock.checkpoint.reader import CheckpointReader, TensorReader
from penstock.checkpoint.sources import check_directory, hugging_face_files, is_hugging_face, unknown_contents
from penstock.errors import CheckpointError
from penstock.ir import bytes_text

TEMPORARY = ".tmp-"
"""prefix of a checkpoint that is being written"""
_REPLACED, _DISCARDED = ".replaced-", ".discarded-"
_STEP_PREFIXES = ("step-", f"{TEMPORARY}step-", f"{_DISCARDED}step-")
"""of checkpoints that are here, are being written or are being removed"""
MAX_TRIES, _MAX_LISTINGS = 100, 10
"""how often work on checkpoints is repeated if some vanish, and how often a directory is listed until one is found"""
_PAUSE_SECONDS = 0.02

T = TypeVar("T")


def is_checkpoint(path: Path) -> bool:
    """Whether this is a single checkpoint, complete or not."""
    return (path / NAME).is_file() or step_of(path) is not None


class CheckpointDir:
    """The checkpoints of one training run."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def checkpoints(self) -> list[Path]:
        """All checkpoints, newest first; symbolic links do not count. Empty if the directory does not exist."""
        try:
            paths = list(self.root.iterdir())
        except OSError:
            return []
        checkpoints = [path for path in paths if step_of(path) is not None and path.is_dir() and not path.is_symlink()]
        return sorted(checkpoints, key=lambda path: (step_of(path), path.name), reverse=True)

    @property
    def has_any(self) -> bool:
        """Whether there is a checkpoint to load, even one that an interrupted save has left under another name."""
        return bool(self.checkpoints) or any(_step(path) is not None for path in self.root.glob(f"{_REPLACED}step-*"))

    @property
    def newest_step(self) -> int | None:
        """The step of the newest checkpoint with a readable manifest; its other files are not read."""
        return next((step_of(path) for path in self.checkpoints if _has_manifest(path)), None)

    def create(self) -> None:
        """Make the directory and missing parents, accessible to their owner only."""
        # mkdir(parents=True) would make the parents accessible to others.
        for path in reversed((self.root, *self.root.parents)):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)

    def clean_up(self) -> list[str]:
        """Remove the directories of interrupted saves, except those that a process uses; returns their names.

        Only the process that saves here calls this: readers change nothing.
        """
        removed = []
        for path in sorted(self.root.iterdir()):
            if path.is_symlink() or not path.is_dir():
                continue
            if path.name.startswith(f"{_REPLACED}step-"):
                # The process ended between the two renames of `publish`: put the older checkpoint back. If there is one
                # of that name, it ended after both.
                original = path.with_name(_original(path))
                if original.exists():
                    # Even if a process reads it: `publish` needs the name.
                    _discard(path, even_if_used=True)
                else:
                    path.rename(original)
            if path.name.startswith((f"{TEMPORARY}step-", f"{_DISCARDED}step-", f"{_DISCARDED}replaced-step-")):
                # A directory without its lock stays: on a file system without locks its writer may be alive.
                with suppress(FileNotFoundError), _exclusive(path) as lock:
                    if lock is not None and lock.is_locked:
                        shutil.rmtree(path, ignore_errors=True)
                        removed.append(path.name)
        return removed

    def publish(self, temporary: Path, step: int) -> Path:
        """Give a complete checkpoint its final name; an older one of that name exists until then."""
        final = self.root / step_name(step)
        older = final.with_name(f"{_REPLACED}{final.name}")
        # A directory cannot replace another one atomically. Between the two renames there is no checkpoint of this
        # name, but `clean_up` puts the older one back.
        if os.path.lexists(final):
            final.rename(older)
        temporary.rename(final)
        sync_directory(self.root)
        if os.path.lexists(older):
            _discard(older, even_if_used=True)
        return final

    def prune(self, keep: int, newest: Path) -> list[str]:
        """Remove all checkpoints before `newest` except the last good ones, so that `keep` remain; returns their names.

        A checkpoint that a process reads stays, and is removed by a later call.
        """
        kept, removed = 1, []
        for path in self.checkpoints:
            if step_of(path) >= step_of(newest):
                continue  # the newest itself, or one of another run
            # A checkpoint without a readable manifest is of no use, and does not count.
            if kept < keep and _has_manifest(path):
                kept += 1
                continue
            with suppress(FileNotFoundError):  # removed by hand meanwhile
                if _discard(path):
                    removed.append(path.name)
        return removed


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _has_manifest(path: Path) -> bool:
    try:
        read_manifest(path)
    except (CheckpointError, OSError):
        return False
    return True


@contextmanager
def _exclusive(path: Path) -> Iterator[DirectoryLock | None]:
    """Hold the exclusive lock of a directory in the body; None if another process uses the directory."""
    lock = lock_exclusively(path)
    try:
        yield lock
    finally:
        if lock is not None:
            lock.release()


def _discard(path: Path, even_if_used: bool = False) -> bool:
    """Remove a checkpoint; False if a process uses it, and nothing is removed.

    It is renamed first, so that it does not look like a checkpoint when it is half removed. With `even_if_used`, one
    that a process uses is renamed too; `clean_up` removes it later.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
        return True
    with _exclusive(path) as lock:
        if lock is None and not even_if_used:
            return False
        # A random suffix: an earlier one of this name may still be there, because a process reads it.
        discarded = path.with_name(f"{_DISCARDED}{path.name.lstrip('.')}.{secrets.token_hex(4)}")
        path.rename(discarded)
        if lock is not None:
            shutil.rmtree(discarded, ignore_errors=True)
    return lock is not None


def find_checkpoints(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints at a path, newest first: itself, or those in it. Raises an error if it finds no checkpoint."""
    directory = check_directory(path)
    if is_checkpoint(directory):
        return [directory]
    for _ in range(_MAX_LISTINGS):
        # A checkpoint that is being replaced has another name for a moment, or for long if its process was killed.
        replaced = [each for each in directory.glob(f"{_REPLACED}step-*") if each.is_dir() and _step(each) is not None]
        found = CheckpointDir(directory).checkpoints
        found += [each for each in replaced if each.with_name(_original(each)) not in found]
        if found:
            return sorted(found, key=lambda each: (_step(each), _original(each)), reverse=True)
        # While the directory was listed, a save may have added a checkpoint and removed the only one that was seen.
        if not any(each.name.startswith(_STEP_PREFIXES) for each in directory.iterdir()):
            break
        time.sleep(_PAUSE_SECONDS)
    raise unknown_contents(directory)


def _original(path: Path) -> str:
    """The name that a checkpoint has, or had before it was replaced."""
    return path.name.removeprefix(_REPLACED)


def _step(path: Path) -> int | None:
    """The step of a checkpoint, replaced or not; None if the name is not that of a checkpoint."""
    return step_of(path.with_name(_original(path)))


def with_checkpoints(path: str | os.PathLike[str], work: Callable[[list[Path]], T]) -> T:
    """Call `work` with the checkpoints at a path, and return its result.

    If it raises VanishedError, because another process has removed or replaced a checkpoint, they are listed again and
    it is called again.
    """
    for _ in range(MAX_TRIES):
        try:
            return work(find_checkpoints(path))
        except VanishedError as error:
            last = error
            time.sleep(_PAUSE_SECONDS)
    raise last


def open_newest(path: str | os.PathLike[str]) -> CheckpointReader:
    """The newest checkpoint at a path, locked until the reader is closed."""
    return with_checkpoints(path, lambda found: CheckpointReader(found[0]))


def open_tensors(path: str | os.PathLike[str]) -> TensorReader:
    """The tensors of a Hugging Face directory, or of the newest checkpoint at a path; none is read yet."""
    directory = check_directory(path)
    if is_hugging_face(directory):
        return TensorReader(hugging_face_files(directory))
    with open_newest(directory) as newest:
        return newest.tensors


class CheckpointSummary(NamedTuple):
    """One line of `penstock ckpt ls`."""

    name: str
    written: str = ""
    bytes: int = 0
    ranks: int = 0
    schedule: str = ""
    state: str = "incomplete"
    """`complete`, `incomplete`, or a description of the damage"""

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table."""
        details = (self.written, bytes_text(self.bytes), str(self.ranks), self.schedule) if self.written else ("",) * 4
        return (self.name, *details, self.state)


def list_checkpoints(path: Path) -> list[CheckpointSummary]:
    """The checkpoints of a directory, newest first, and then interrupted saves. Only manifests and sizes are read."""

    def summary(directory: Path) -> CheckpointSummary:
        try:
            with CheckpointReader(directory) as reader:
                manifest, plan = reader.manifest, reader.manifest.plan
        except VanishedError:
            raise
        except CheckpointError as error:
            return CheckpointSummary(directory.name, state=str(error).splitlines()[0])
        size = manifest.total_bytes
        return CheckpointSummary(directory.name, manifest.written, size, plan.ranks, plan.schedule, "complete")

    checkpoints = _for_each(path, summary)
    if not is_checkpoint(path):
        names = sorted(entry.name for entry in path.iterdir())
        checkpoints += [CheckpointSummary(name) for name in names if name.startswith(f"{TEMPORARY}step-")]
    return checkpoints


class VerifyResult(NamedTuple):
    """Result of comparing all files of a checkpoint with their digests."""

    name: str
    files: int
    bytes: int
    problem: str
    """empty if all files are as they were written"""


def verify_checkpoints(path: Path) -> list[VerifyResult]:
    """Verify every checkpoint at a path, newest first; those that are removed meanwhile are left out."""

    def verify(directory: Path) -> VerifyResult:
        try:
            with CheckpointReader(directory) as reader:
                total = reader.verify()
                return VerifyResult(directory.name, len(reader.manifest.files), total, "")
        except VanishedError:
            raise
        except CheckpointError as error:
            return VerifyResult(directory.name, 0, 0, str(error).splitlines()[0])

    return _for_each(path, verify)


def _for_each(path: Path, read: Callable[[Path], T]) -> list[T]:
    """The result for every checkpoint at a path that does not vanish, newest first."""

    def read_all(checkpoints: list[Path]) -> list[T]:
        results = []
        for checkpoint in checkpoints:
            try:
                results.append(read(checkpoint))
            except VanishedError:
                if checkpoint == checkpoints[-1] and not results:
                    raise  # all have vanished: `with_checkpoints` lists those that are there now
        return results

    return with_checkpoints(path, read_all)
