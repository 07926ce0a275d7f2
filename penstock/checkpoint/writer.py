"""Writes a checkpoint by several ranks. They communicate through files, so that a thread can do all of it.

Every rank has a marker file in the temporary directory: `rank-002.part` while it writes, then `.done` with the records
of its files, or `.failed` with the reason. The first rank waits for all markers, writes the manifest and renames the
directory, or removes it. A crash at any moment leaves either the old state or the new one: all files are synced to disk
before the rename, and a directory without its final name is never read.
"""

import logging
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint.collective import write_error
from penstock.checkpoint.directory import TEMPORARY, CheckpointDir, sync_directory
from penstock.checkpoint.locks import DirectoryLock, lock_exclusively
from penstock.checkpoint.manifest import NAME, Manifest, step_name
from penstock.checkpoint.tensor_file import FileRecord, read_bytes, write_bytes, write_tensors
from penstock.errors import CheckpointError
from penstock.runtime import json_bytes, parse_json

_LOGGER = logging.getLogger(__name__)
_MAX_MARKER_BYTES = 1 << 26
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.1
_LOWEST_PRIORITY = 19
STALL_SECONDS = 60.0
"""time without any growth of the files after which a rank is considered lost"""

Content = bytes | Mapping[str, Tensor]
"""the content of a file: a document, or tensors"""
MakeManifest = Callable[[Mapping[str, FileRecord]], Manifest]


@dataclass(frozen=True)
class CheckpointWriter:
    """A checkpoint that is being written, in a temporary directory."""

    path: Path
    ranks: int
    lock: DirectoryLock | None = field(default=None, compare=False)
    """held by the rank that made the directory, so that `CheckpointDir.clean_up` leaves it alone"""

    @classmethod
    def create(cls, root: Path, step: int, ranks: int) -> "CheckpointWriter":
        """Make a temporary directory, which this process will finish."""
        while True:
            path = root / f"{TEMPORARY}{step_name(step)}-{secrets.token_hex(4)}"
            path.mkdir(mode=0o700)
            with suppress(FileNotFoundError):
                lock = lock_exclusively(path)
                if lock is not None and lock.is_current:
                    return cls(path, ranks, lock)
                if lock is not None:
                    lock.release()
            # Not locked in time: the `clean_up` of another process has taken it for the rest of an interrupted save.

    def join(self, rank: int) -> None:
        """Announce that this rank will write; refused if it does not see the directory."""
        try:
            os.close(os.open(self._marker(rank, "part"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileNotFoundError as error:
            raise CheckpointError(
                "a rank cannot reach the directory that the first rank writes to",
                path=self.path,
                reason=error.strerror,
                hint="a path that all ranks share",
            ) from None
        except OSError as error:
            problem = "the checkpoint could not be written"
            raise CheckpointError(problem, path=self.path, reason=error.strerror) from None

    def write(self, rank: int, contents: Mapping[str, Content]) -> None:
        """Write the files of a rank and its marker. Errors go into the marker, from which `finish` raises them."""
        try:
            records = {name: write_file(self.path / name, content, rank) for name, content in contents.items()}
            self._mark(rank, "done", {name: asdict(record) for name, record in records.items()})
        except Exception as error:
            # Remove the files written so far: if the disk is full, the marker needs the room.
            for name in contents:
                (self.path / name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # the first rank has given up and removed the directory
                self._mark(rank, "failed", str(write_error(error)))

    def finish(self, step: int, keep: int | None, make_manifest: MakeManifest) -> Path:
        """Wait for all ranks, write the manifest and give the checkpoint its name; on failure nothing is left."""
        root = CheckpointDir(self.path.parent)
        try:
            records = self._gather_records()
            for rank in range(self.ranks):  # the markers are not part of the checkpoint
                self._marker(rank, "done").unlink()
            # The manifest comes last: a directory that has one is complete. Names are synced before the rename, too.
            write_bytes(self.path / NAME, [make_manifest(records).to_bytes()])
            sync_directory(self.path)
            final = root.publish(self.path, step)
        except Exception as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise write_error(error) from None
        finally:
            if self.lock is not None:
                self.lock.release()  # from now on others may read it
        if keep is not None:
            try:
                root.prune(keep, final)
            except OSError as error:
                raise write_error(error) from None
        return final

    def abandon(self) -> None:
        """Remove the directory if this process made it: nothing will be written."""
        if self.lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.lock.release()

    def wait(self) -> None:
        """Wait until the rank that made the directory has finished, successfully or not."""
        self._poll(lambda: not self.path.exists())

    def _gather_records(self) -> dict[str, FileRecord]:
        """The records of the files of all ranks, from their markers."""
        markers: dict[int, Any] = {}

        def all_have_finished() -> bool:
            for rank in range(self.ranks):
                if rank not in markers and self._marker(rank, "failed").exists():
                    reason = parse_json(read_bytes(self._marker(rank, "failed"), _MAX_MARKER_BYTES) or b'""', "marker")
                    markers[rank] = reason or "its files could not be written"
                elif rank not in markers and self._marker(rank, "done").exists():
                    markers[rank] = parse_json(read_bytes(self._marker(rank, "done"), _MAX_MARKER_BYTES), "marker")
            return len(markers) == self.ranks

        if not self._poll(all_have_finished):
            late = [rank for rank in range(self.ranks) if rank not in markers]
            problem = "timed out waiting for ranks to write their checkpoint files"
            raise CheckpointError(problem, ranks=late, seconds=STALL_SECONDS)
        for rank, records in sorted(markers.items()):
            if isinstance(records, str):
                raise CheckpointError(f"a rank could not write its files: {records}", rank=rank)
        return {name: FileRecord(**record) for _, part in sorted(markers.items()) for name, record in part.items()}

    def _poll(self, is_over: Callable[[], bool]) -> bool:
        """Wait until `is_over`; False if no file has grown for STALL_SECONDS."""
        # Short pauses at first, because a small checkpoint is written in milliseconds.
        pause, size, since = _FIRST_PAUSE_SECONDS, -1, time.monotonic()
        while not is_over():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if (now := self._size()) != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                return False
        return True

    def _size(self) -> int:
        """The size of all files, which grows while any rank writes."""
        total = 0
        with suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                total += entry.stat().st_size + 1  # + 1: a new empty file is progress too
        return total

    def _marker(self, rank: int, state: str) -> Path:
        return self.path / f"rank-{rank:03d}.{state}"

    def _mark(self, rank: int, state: str, content: object) -> None:
        """Replace the marker atomically. If the disk is full, an empty `.failed` marker is still written."""
        marker = self._marker(rank, "part")
        try:
            marker.write_bytes(json_bytes(content))
        except OSError:
            if state == "done":
                raise
            os.truncate(marker, 0)
        marker.rename(self._marker(rank, state))


def write_file(path: Path, content: Content, rank: int) -> FileRecord:
    """Write one file of a checkpoint."""
    return write_bytes(path, [content], rank) if isinstance(content, bytes) else write_tensors(path, content, rank)


class BackgroundWriter:
    """Runs one save at a time in a thread and keeps its error until `take_error`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.error: CheckpointError | None = None
        """of the last save, until `take_error` returns it"""

    def start(self, work: Callable[[], CheckpointError | None]) -> None:
        """Run `work`, which returns its error; the previous save must have ended."""
        # Not a daemon: the interpreter waits for it at exit, so that a save that was begun is completed.
        self._thread = threading.Thread(target=self._run, args=(work,), name="penstock checkpoint", daemon=False)
        self._thread.start()

    def _run(self, work: Callable[[], CheckpointError | None]) -> None:
        if sys.platform == "linux":
            # Hashing takes time that passes need if all cores compute: this thread runs while ranks wait. On Linux a
            # priority is that of one thread.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            self.error = work()
        except Exception as error:
            self.error = error if isinstance(error, CheckpointError) else CheckpointError(f"saving failed: {error!r}")
        if self.error is not None:
            # Logged at once: there may be no further step that could raise it.
            _LOGGER.error("a checkpoint was not written: %s", self.error)

    def wait(self) -> None:
        """Wait for the running save, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> CheckpointError | None:
        """The error of the last save, once."""
        error, self.error = self.error, None
        return error

    def wait_and_raise(self) -> None:
        """Wait for the running save; raises its error unless it was taken before."""
        self.wait()
        if error := self.take_error():
            raise error
