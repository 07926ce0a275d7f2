"""A private directory that is gone when its owner is done with it, also when the owner is killed."""

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "PENSTOCK_SCRATCH"
# A mapped page of a file on a disk waits for the disk whenever the kernel writes it back; in memory it never does.
_IN_MEMORY = Path("/dev/shm")
_ENOUGH_BYTES = 16 << 20
# The shell waits for the end of its input, which comes when the last process that holds the other end is gone.
_CARETAKER = 'read -r _; rm -rf -- "$0"'


def place() -> Path:
    """Where small files that are written all the time belong: where the user says, or in memory if there is room."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    try:
        has_room = shutil.disk_usage(_IN_MEMORY).free >= _ENOUGH_BYTES and os.access(_IN_MEMORY, os.W_OK | os.X_OK)
    except OSError:
        has_room = False
    return _IN_MEMORY if has_room else Path(tempfile.gettempdir())


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory that only this user can read; a caretaker process removes it if this one no longer can."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir=place()))
    try:
        caretaker = _caretaker(directory)
        try:
            yield directory
        finally:
            caretaker.kill()
            caretaker.communicate()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_at_end(directory: Path) -> None:
    """The directory is removed when this process ends, however that happens."""
    caretaker, owner = _caretaker(directory), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a process that this one has forked
            caretaker.kill()
            caretaker.communicate()
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)


def _caretaker(directory: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["/bin/sh", "-c", _CARETAKER, os.fspath(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # ctrl-c is not for the caretaker
    )
