"""A directory of checkpoints: one subdirectory per saved step, and temporary ones while they are written or removed."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.checkpoint.manifest import NAME, read_manifest, step_name, step_of
from penstock.checkpoint.reader import CheckpointReader, TensorReader
from penstock.checkpoint.sources import check_directory, hugging_face_files, is_hugging_face, unknown_contents
from penstock.errors import CheckpointError
from penstock.ir import bytes_text

TEMPORARY = ".tmp-"
"""prefix of a checkpoint that is being written"""
_REPLACED, _DISCARDED = ".replaced-", ".discarded-"


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
        if not self.root.is_dir():
            return []
        checkpoints = [
            path
            for path in self.root.iterdir()
            if step_of(path) is not None and path.is_dir() and not path.is_symlink()
        ]
        return sorted(checkpoints, key=lambda path: (step_of(path), path.name), reverse=True)

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
        """Remove what interrupted saves left behind, except directories that a process still writes; returns names."""
        removed = []
        for path in sorted(self.root.iterdir()):
            if path.is_symlink() or not path.is_dir():
                continue
            if path.name.startswith(f"{_REPLACED}step-"):
                # The process ended between the two renames of `publish`: the older checkpoint counts.
                original = path.with_name(path.name.removeprefix(_REPLACED))
                if original.exists():
                    _discard(path)
                else:
                    path.rename(original)
            if (
                path.name.startswith((f"{TEMPORARY}step-", f"{_DISCARDED}step-", f"{_DISCARDED}replaced-step-"))
                and (lock := lock_directory(path)) is not None  # else its writer is alive
            ):
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
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
            _discard(older)
        return final

    def prune(self, keep: int, newest: Path) -> list[str]:
        """Remove all checkpoints before `newest` but the last good ones, so that `keep` remain; returns their names."""
        kept, removed = 1, []
        for path in self.checkpoints:
            if (step_of(path) or 0) >= (step_of(newest) or 0):
                continue  # the newest itself, or one of another run
            if kept < keep and _has_manifest(path):
                kept += 1
            else:
                _discard(path)
                removed.append(path.name)
        return removed


def lock_directory(path: Path) -> int | None:
    """Lock a directory until the returned descriptor is closed; None if another process holds the lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


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


def _discard(path: Path) -> None:
    """Remove a checkpoint. The rename comes first: half removed, it must not look like a checkpoint."""
    discarded = path.with_name(f"{_DISCARDED}{path.name.lstrip('.')}.{os.getpid()}")
    path.rename(discarded)
    if discarded.is_symlink() or discarded.is_file():
        discarded.unlink()
    else:
        shutil.rmtree(discarded, ignore_errors=True)


def find_checkpoints(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints at a path, newest first: itself, or those in it. Raises an error if it finds no checkpoint."""
    directory = check_directory(path)
    if is_checkpoint(directory):
        return [directory]
    if found := CheckpointDir(directory).checkpoints:
        return found
    raise unknown_contents(directory)


def open_tensors(path: str | os.PathLike[str]) -> TensorReader:
    """The tensors of a Hugging Face directory, or of the newest checkpoint at a path; none is read yet."""
    directory = check_directory(path)
    if is_hugging_face(directory):
        return TensorReader(hugging_face_files(directory))
    newest, *_ = find_checkpoints(directory)
    return TensorReader({name: newest / record.file for name, record in read_manifest(newest).tensors.items()})


class CheckpointSummary(NamedTuple):
    """A checkpoint in one line."""

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


def list_checkpoints(path: Path) -> Iterator[CheckpointSummary]:
    """The checkpoints of a directory, newest first, and then interrupted saves. Only manifests and sizes are read."""
    checkpoints = find_checkpoints(path)
    for directory in checkpoints:
        try:
            with CheckpointReader(directory) as reader:
                manifest = reader.manifest
        except CheckpointError as error:
            yield CheckpointSummary(directory.name, state=str(error).splitlines()[0])
            continue
        plan = manifest.plan
        yield CheckpointSummary(
            directory.name, manifest.written, manifest.total_bytes, plan.ranks, plan.schedule, "complete"
        )
    if checkpoints != [path]:
        for entry in sorted(path.iterdir()):
            if entry.name.startswith(f"{TEMPORARY}step-"):
                yield CheckpointSummary(entry.name)


class VerifyResult(NamedTuple):
    """Result of comparing all files of a checkpoint with their digests."""

    name: str
    files: int
    bytes: int
    problem: str
    """empty if all files are as they were written"""


def verify_checkpoints(path: Path) -> Iterator[VerifyResult]:
    """Verify every checkpoint at a path, newest first."""
    for directory in find_checkpoints(path):
        try:
            with CheckpointReader(directory) as reader:
                total = reader.verify()
                yield VerifyResult(directory.name, len(reader.manifest.files), total, "")
        except CheckpointError as error:
            yield VerifyResult(directory.name, 0, 0, str(error).splitlines()[0])
