"""Locks of checkpoint directories between processes, by flock.

A writer holds the exclusive lock of its temporary directory, readers hold the shared lock of a checkpoint, and a
process that removes a directory takes the exclusive lock first. So a directory is removed only when no process writes
or reads it. On a file system without locks, such as some network file systems, temporary directories of killed
processes stay, and a checkpoint may be removed while it is read: the reader notices it and reads the next one.
"""

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from penstock.errors import DamagedError

_POLL_SECONDS = 0.005
_WAIT_SECONDS = 10.0


class VanishedError(DamagedError):
    """A checkpoint was removed or replaced while it was read."""


class DirectoryLock:
    """A lock of a directory. It stays with the directory if that is renamed, or replaced by another one at its path."""

    def __init__(self, path: Path, descriptor: int, is_locked: bool = True) -> None:
        self.path, self._descriptor = path, descriptor
        self.is_locked = is_locked
        """False if the file system has no locks"""

    @property
    def is_current(self) -> bool:
        """Whether the directory still has its name."""
        try:
            here, there = os.fstat(self._descriptor), os.stat(self.path)
        except OSError:
            return False
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        """Release the lock; a second call has no effect."""
        if self._descriptor < 0:
            return
        with suppress(OSError):
            # Explicitly: a process forked meanwhile, such as a data-loader worker, has the descriptor too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1


def lock_exclusively(path: Path) -> DirectoryLock | None:
    """Lock a directory that no process reads or writes; None if one does."""
    return _lock(path, os.O_NOFOLLOW, fcntl.LOCK_EX)


def lock_shared(path: Path) -> DirectoryLock:
    """Lock a checkpoint, so that it is not removed.

    Raises:
        VanishedError: if the directory does not exist, was replaced meanwhile, or stays locked exclusively
    """
    end = time.monotonic() + _WAIT_SECONDS
    try:
        # An exclusive lock is held for a short time only: just after a checkpoint is written, or while it is removed.
        while (lock := _lock(path, 0, fcntl.LOCK_SH)) is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
    except (FileNotFoundError, NotADirectoryError):
        lock = None
    except OSError as error:
        raise DamagedError("cannot read a directory", path=path, reason=error.strerror) from None
    # Between opening and locking, a process may have removed the directory or put another one in its place.
    if lock is not None and lock.is_current:
        return lock
    if lock is not None:
        lock.release()
    raise vanished(path)


def vanished(path: Path) -> VanishedError:
    """The error for a checkpoint that is gone."""
    return VanishedError("the checkpoint was removed or replaced while it was read", path=path)


def _lock(path: Path, flags: int, kind: int) -> DirectoryLock | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:  # the file system has no locks
            return DirectoryLock(path, descriptor, is_locked=False)
        os.close(descriptor)
        return None
    return DirectoryLock(path, descriptor)
