"""Draft: a checkpoint while several ranks write it; they tell each other by files, so that a thread can do it all.

Every rank has a mark in the draft: `rank-002.part` while it writes, then `.done` with what it wrote, or `.failed` with
the reason. The first rank waits for all marks and gives the draft its name, or clears it away.
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.checkpoint.manifest import NAME, Manifest, read_plain
from penstock.checkpoint.shelf import DRAFT, locked, name_of, prune, put_in_place, sync
from penstock.checkpoint.tensors_file import FileRecord, write_bytes, write_tensors
from penstock.checkpoint.values import from_text, to_text
from penstock.errors import CheckpointError

_LARGEST_MARK = 1 << 26
_LOOK_SECONDS = 0.002
_MOST_SECONDS = 0.1
STALL_SECONDS = 60.0
"""how long nothing may be written before a rank is taken for lost"""

Content = bytes | Mapping[str, Tensor]
Finish = Callable[[Mapping[str, FileRecord]], Manifest]


@dataclass(frozen=True)
class Draft:
    """Where a checkpoint is written before it has its name."""

    path: Path
    ranks: int
    lock: int | None = field(default=None, compare=False)
    """held by the rank that made it, so that nobody takes it for left behind"""

    @classmethod
    def create(cls, root: Path, step: int, ranks: int) -> "Draft":
        """A new one, which this process will finish."""
        path = root / f"{DRAFT}{name_of(step)}-{secrets.token_hex(4)}"
        path.mkdir(mode=0o700)
        return cls(path, ranks, locked(path))

    def enter(self, rank: int) -> None:
        """This rank will write here."""
        os.close(os.open(self._mark(rank, "part"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))

    def write(self, rank: int, contents: Mapping[str, Content]) -> CheckpointError | None:
        """Write the files of a rank and leave its mark; what went wrong, if anything did."""
        try:
            records = {name: _written(self.path / name, content, rank) for name, content in contents.items()}
            self._leave(rank, "done", {name: asdict(record) for name, record in records.items()})
        except Exception as error:
            told = _told(error)
            # What was written so far is of no use, and a full disk needs the room for the mark.
            for name in contents:
                (self.path / name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # the first rank has given it up, and cleared it away
                self._leave(rank, "failed", str(told))
            return told
        return None

    def finish(self, step: int, keep: int | None, manifest_of: Finish) -> Path:
        """Wait for all ranks, write the manifest, and give the checkpoint its name; nothing is left if that fails."""
        try:
            records = self._gathered()
            for rank in range(self.ranks):
                self._mark(rank, "done").unlink()
            write_bytes(self.path / NAME, [manifest_of(records).text()])
            sync(self.path)
            place = self.path.parent / name_of(step)
            put_in_place(self.path, place)
            if keep is not None:
                prune(place.parent, keep, place)
        except Exception as error:
            shutil.rmtree(self.path, ignore_errors=True)
            raise _told(error) from None
        finally:
            if self.lock is not None:
                os.close(self.lock)
        return place

    def abandon(self) -> None:
        """Nothing will be written: if this process made it, it goes."""
        if self.lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)

    def wait(self) -> None:
        """Wait until the rank that made it is through, whatever came of it."""
        self._watch(lambda: not self.path.exists())

    def _gathered(self) -> dict[str, FileRecord]:
        """What all ranks have written."""
        found: dict[int, Any] = {}

        def are_through() -> bool:
            for rank in range(self.ranks):
                if rank not in found and self._mark(rank, "failed").exists():
                    said = from_text(read_plain(self._mark(rank, "failed"), _LARGEST_MARK) or b'""', "mark")
                    found[rank] = said or "its files could not be written"
                elif rank not in found and self._mark(rank, "done").exists():
                    found[rank] = from_text(read_plain(self._mark(rank, "done"), _LARGEST_MARK), "mark")
            return len(found) == self.ranks

        if not self._watch(are_through):
            late = [rank for rank in range(self.ranks) if rank not in found]
            raise CheckpointError("a rank does not get on with its files", ranks=late, seconds=STALL_SECONDS)
        for rank, said in sorted(found.items()):
            if isinstance(said, str):
                raise CheckpointError(f"a rank could not write its files: {said}", rank=rank)
        return {name: FileRecord(**record) for _, part in sorted(found.items()) for name, record in part.items()}

    def _watch(self, is_over: Callable[[], bool]) -> bool:
        """Look again and again until it is over; False if all the while nothing grows."""
        pause, size, since = _LOOK_SECONDS, -1, time.monotonic()
        while not is_over():
            time.sleep(pause)
            pause = min(2 * pause, _MOST_SECONDS)
            if (now := self._size()) != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > STALL_SECONDS:
                return False
        return True

    def _size(self) -> int:
        total = 0
        try:
            with os.scandir(self.path) as found:
                for entry in found:
                    total += entry.stat().st_size + 1
        except OSError:
            return total
        return total

    def _mark(self, rank: int, state: str) -> Path:
        return self.path / f"rank-{rank:03d}.{state}"

    def _leave(self, rank: int, state: str, said: object) -> None:
        """The mark in its new state, at one stroke; that it is there counts more than what it says."""
        mark = self._mark(rank, "part")
        try:
            mark.write_bytes(to_text(said))
        except OSError:
            if state == "done":
                raise
            os.truncate(mark, 0)
        mark.rename(self._mark(rank, state))


def _written(path: Path, content: Content, rank: int) -> FileRecord:
    return write_bytes(path, [content], rank) if isinstance(content, bytes) else write_tensors(path, content, rank)


def _told(error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    reason = error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    file = getattr(error, "filename", None)
    return CheckpointError("the checkpoint could not be written", reason=reason, **({"file": file} if file else {}))
