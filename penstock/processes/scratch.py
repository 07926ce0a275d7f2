"""A private directory that is gone when its owner is done with it, also when the owner is killed."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The shell waits for the end of its input, which comes when the last process that holds the other end is gone.
_CARETAKER = 'read -r _; rm -rf -- "$0"'


@contextmanager
def scratch() -> Iterator[Path]:
    """A new directory that only this user can read; a caretaker process removes it if this one no longer can."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        caretaker = subprocess.Popen(
            ["/bin/sh", "-c", _CARETAKER, os.fspath(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # ctrl-c is not for the caretaker
        )
        try:
            yield directory
        finally:
            caretaker.kill()
            caretaker.communicate()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
