"""The Board: one small memory-mapped file per rank in which it notes what it is doing, readable after its death.

A file holds a header, a ring of the last notes, and the text of a failure. A note is one packed record with its number
at both ends; the newest number tells the present. A record that is torn or being written is left out by the reader.
"""

import errno
import mmap
import os
import struct
import time
from pathlib import Path

from penstock.launch import liveness
from penstock.launch.status import ENDED, IDLE, MEETING, PREPARING, STARTED, WAITING, WORKING, Moment, Status

VARIABLE = "PENSTOCK_BOARD"
NUM_RECENT = 256
_STATES = (STARTED, IDLE, WORKING, WAITING, ENDED, PREPARING, MEETING)
_STARTED, _IDLE, _WORKING, _WAITING, _ENDED, _PREPARING, _MEETING = range(len(_STATES))
_CODED = (_WORKING, _WAITING, _MEETING)
_NONE = -1
_MAGIC = b"PENBOARD"
_HEADER = struct.Struct("<8sIIqqq")  # magic, rank, number of ranks, host, pid, start of the process
_NOTE = struct.Struct("<qqqqiiq")  # number, nanoseconds, step, code, state, peer, number
_FAILURE = struct.Struct("<qq")  # nanoseconds, length of the text that follows
_RING = 64
_TEXT = _RING + NUM_RECENT * _NOTE.size
_SIZE = 32768
LARGEST_FAILURE = _SIZE - _TEXT - _FAILURE.size

_pack = _NOTE.pack_into
_clock = time.monotonic_ns
_LENGTH, _MASK = _NOTE.size, NUM_RECENT - 1


class Board:
    """The page of one rank, written by that rank alone; a note costs about half a microsecond."""

    def __init__(self, directory: Path, rank: int, page: mmap.mmap) -> None:
        self.directory = directory
        self.rank = rank
        self._page = page
        self._number = _last_number(page)

    @classmethod
    def create(cls, directory: str | Path, rank: int, ranks: int) -> "Board":
        """Open this rank's page for writing; what this same process noted there before is kept.

        Whoever opens it again in one process gets the same Board: two that count notes apart would hide each other's.
        """
        directory = Path(directory)
        place = (os.getpid(), os.fspath(directory.absolute()), rank)
        known = _OPEN.get(place)
        if known is not None and known._is_of(rank, ranks):
            return known
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        board = cls(directory, rank, _mapped(_path(directory, rank)))
        if not board._is_of(rank, ranks):
            board._page[:] = bytes(_SIZE)
            _HEADER.pack_into(board._page, 0, *_header(rank, ranks))
            board._number = 0
        if not board._number:
            board._note(_STARTED, 0)
        _OPEN[place] = board
        return board

    def _is_of(self, rank: int, ranks: int) -> bool:
        """Whether the page is still there and belongs to this process."""
        is_there = _path(self.directory, self.rank).exists()
        return is_there and _HEADER.unpack_from(self._page) == _header(rank, ranks)

    @staticmethod
    def opened() -> "list[Board]":
        """Those that this process writes."""
        return [board for (pid, *_), board in _OPEN.items() if pid == os.getpid()]

    @staticmethod
    def clear(directory: str | Path) -> None:
        """Remove the pages of an earlier run."""
        for path in _paths(directory):
            path.unlink(missing_ok=True)

    @staticmethod
    def read(directory: str | Path) -> tuple[Status, ...]:
        """What every rank is doing, in order of rank; a rank that has no page yet is `absent`."""
        pages = [page for page in map(Page.open, _paths(directory)) if page]
        found = {page.rank: page.status() for page in pages}
        ranks = max((page.ranks for page in pages), default=0)
        return tuple(found.get(rank, Status(rank)) for rank in range(ranks))

    def preparing(self, step: int) -> None:
        """This rank was called for a step and gets ready for it."""
        self._note(_PREPARING, step)

    def meeting(self, step: int, occasion: int) -> None:
        """This rank waits for all others, to compare what they were called for."""
        self._note(_MEETING, step, occasion)

    # The three calls of the inner loop are written out, because a shared helper would double their cost.

    def working(self, step: int, code: int) -> None:
        """This rank is about to run an action."""
        self._number = number = self._number + 1
        _pack(self._page, _RING + (number & _MASK) * _LENGTH, number, _clock(), step, code, _WORKING, _NONE, number)

    def waiting(self, step: int, code: int, peer: int) -> None:
        """This rank is blocked for the message `code` of rank `peer`."""
        self._number = number = self._number + 1
        _pack(self._page, _RING + (number & _MASK) * _LENGTH, number, _clock(), step, code, _WAITING, peer, number)

    def idle(self, step: int) -> None:
        """This rank is between two steps; `step` is the one that ended."""
        self._number = number = self._number + 1
        _pack(self._page, _RING + (number & _MASK) * _LENGTH, number, _clock(), step, _NONE, _IDLE, _NONE, number)

    def ended(self) -> None:
        """This rank has done all it had to do."""
        self._note(_ENDED, self.now.step)

    def failed(self, text: str) -> None:
        """Something broke here: `text` says what, as JSON. The first failure stays, and a text too long is cut."""
        if not _failure(self._page):
            data = text.encode()[:LARGEST_FAILURE].decode(errors="ignore").encode()
            start = _TEXT + _FAILURE.size
            self._page[start : start + len(data)] = data
            _FAILURE.pack_into(self._page, _TEXT, _clock(), len(data))

    def recovered(self) -> None:
        """The failure was dealt with: others need not stop because of it."""
        _FAILURE.pack_into(self._page, _TEXT, 0, 0)

    @property
    def failure(self) -> str:
        """The text of what broke here, empty if nothing did."""
        return _failure(self._page)

    def status(self) -> Status:
        """What this rank has noted."""
        return Page(self._page).status()

    @property
    def now(self) -> Moment:
        """The last note."""
        return _moment(_NOTE.unpack_from(self._page, _RING + (self._number & _MASK) * _LENGTH))

    def _note(self, state: int, step: int, code: int = _NONE) -> None:
        self._number = number = self._number + 1
        _pack(self._page, _RING + (number & _MASK) * _LENGTH, number, _clock(), step, code, state, _NONE, number)


class Page:
    """The page of any rank, for reading."""

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        _, self.rank, self.ranks, *_ = _HEADER.unpack_from(page)

    @classmethod
    def open(cls, path: Path) -> "Page | None":
        """The page in a file, None if it is not (or not yet) one."""
        try:
            with path.open("rb") as file:
                page = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        return cls(page) if page[: len(_MAGIC)] == _MAGIC else None

    @classmethod
    def of(cls, directory: Path, rank: int) -> "Page | None":
        """The page of one rank, None if it has not made one."""
        return cls.open(_path(directory, rank))

    @property
    def process(self) -> str:
        """`running`, `stopped`, `gone`, or `elsewhere` for a process of another host that shares this directory."""
        *_, host, pid, ticks = _HEADER.unpack_from(self._page)  # a new process may have taken the page over
        return liveness.state_of(pid, ticks) if host == liveness.host() else liveness.ELSEWHERE

    @property
    def failure(self) -> str:
        """The text of what broke, empty if nothing did."""
        return _failure(self._page)

    def status(self) -> Status:
        """All that is noted here."""
        *_, pid, _ = _HEADER.unpack_from(self._page)
        return Status(self.rank, pid, self.process, _recent(self._page), self.failure)


_OPEN: dict[tuple[int, str, int], Board] = {}


def _header(rank: int, ranks: int) -> tuple[bytes, int, int, int, int, int]:
    return _MAGIC, rank, ranks, liveness.host(), os.getpid(), liveness.started(os.getpid())


def _mapped(path: Path) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _reserve(handle)
        return mmap.mmap(handle, _SIZE)
    finally:
        os.close(handle)


def _reserve(handle: int) -> None:
    """Take the room now: to write into a mapped page for which a full disk has none would kill the process."""
    try:
        os.posix_fallocate(handle, 0, _SIZE)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC:
            raise
        os.ftruncate(handle, _SIZE)  # some file systems and systems cannot promise it


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank:05d}.board"


def _paths(directory: str | Path) -> list[Path]:
    return sorted(Path(directory).glob("rank*.board"))


def _failure(page: mmap.mmap) -> str:
    _, length = _FAILURE.unpack_from(page, _TEXT)
    start = _TEXT + _FAILURE.size
    return page[start : start + length].decode(errors="replace") if 0 < length <= LARGEST_FAILURE else ""


def _records(page: mmap.mmap) -> list[tuple[int, ...]]:
    # A record that was being written while the first copy was made differs in the second one.
    first, second = page[_RING:_TEXT], page[_RING:_TEXT]
    pairs = zip(_NOTE.iter_unpack(first), _NOTE.iter_unpack(second), strict=True)
    return sorted(record for record, again in pairs if record == again and record[0] == record[-1] > 0)


def _last_number(page: mmap.mmap) -> int:
    records = _records(page)
    return records[-1][0] if records else 0


def _recent(page: mmap.mmap) -> tuple[Moment, ...]:
    return tuple(_moment(record) for record in _records(page) if 0 <= record[4] < len(_STATES))


def _moment(record: tuple[int, ...]) -> Moment:
    _, ns, step, code, state, peer, _ = record
    return Moment(_STATES[state], step, code if state in _CODED else None, peer if peer >= 0 else None, ns / 1e9)
