"""Private temporary directories that are removed when their owner ends, even if the owner is killed."""

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.launch.devices import group_device
from penstock.launch.status_file import status_directory

SCRATCH_VARIABLE = "PENSTOCK_SCRATCH"
"""environment variable with the directory in which temporary directories are made"""
# A mapped page of a file on disk blocks whenever the kernel writes it back; in memory it never does.
_IN_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 16 << 20
# The shell waits for the end of its input, which comes when the last process that holds the other end is gone.
# Then it ends the programs that ranks have started: they are in the process groups that the ranks have named.
GROUP_PREFIX = "group-"
_END_GROUPS = f'for file in "$0"/{GROUP_PREFIX}*; do kill -s KILL -- "-${{file##*-}}"; done'
_CLEANUP_SCRIPT = f'read -r _; {_END_GROUPS}; rm -rf -- "$0"'
_MAX_PATH_BYTES = 4096
# By default group, which is not kept alive by it: a group that is freed in a forked process waits for its threads,
# which only the parent has.
_shared: WeakKeyDictionary[Any, tuple[int, Path]] = WeakKeyDictionary()
"""the process that made a directory for status files, and the directory"""


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory that only this user can read; a cleanup process removes it if this process is killed."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir=_parent()))
    try:
        cleaner = _start_cleaner(directory)
        try:
            yield directory
        finally:
            cleaner.kill()
            cleaner.communicate()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_at_exit(directory: Path) -> None:
    """Remove the directory when this process ends, however it ends."""
    cleaner, owner = _start_cleaner(directory), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a process forked from this one
            cleaner.kill()
            cleaner.communicate()
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)


def shared_status_directory() -> Path:
    """A directory for status files with the same name on every rank; a collective call of the default group.

    It is the launcher's directory, or one that rank 0 makes in the first call. A rank on another host makes its own of
    that name, and sees the status files of its host only.
    """
    known = status_directory()
    if known is not None:
        return known
    process, directory = _shared.get(dist.group.WORLD, (0, Path()))
    if process == os.getpid():
        return directory
    is_first = dist.get_rank() == 0
    parent = _parent()  # on every rank, so that all of them raise its error
    path = tempfile.mkdtemp(prefix="penstock-", dir=parent) if is_first else ""
    # As bytes of a fixed length: broadcast_object_list would unpickle data from the network.
    padded = list(path.encode().ljust(_MAX_PATH_BYTES, b"\0"))
    content = torch.tensor(padded, dtype=torch.uint8, device=group_device())
    dist.broadcast(content, src=0)
    directory = Path(bytes(content.tolist()).rstrip(b"\0").decode())
    _shared[dist.group.WORLD] = os.getpid(), directory
    if not is_first:
        try:
            directory.mkdir(mode=0o700)
        except OSError:
            return directory  # rank 0 or another rank of this host has made it, and removes it
    remove_at_exit(directory)
    return directory


def _parent() -> Path:
    """The directory in which temporary directories are made: in memory if there is room."""
    if named := os.environ.get(SCRATCH_VARIABLE):
        if not os.path.isdir(named) or not os.access(named, os.W_OK | os.X_OK):
            raise RunError(
                f"{SCRATCH_VARIABLE} must be a directory that can be written", got=named, hint=f"mkdir -p {named}"
            )
        return Path(named)
    try:
        has_room = shutil.disk_usage(_IN_MEMORY).free >= _ENOUGH_BYTES and os.access(_IN_MEMORY, os.W_OK | os.X_OK)
    except OSError:
        has_room = False
    return _IN_MEMORY if has_room else Path(tempfile.gettempdir())


def _start_cleaner(directory: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["/bin/sh", "-c", _CLEANUP_SCRIPT, os.fspath(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # keeps ctrl-c away from it
    )
