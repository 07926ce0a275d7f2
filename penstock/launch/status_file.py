"""A small memory-mapped file per rank, in which the rank records its current activity.

Other processes read the file while the rank runs and after it has died. It holds a header, a ring buffer of the most
recent entries, and the text of a failure. An entry is one packed record with its sequence number at both ends: the
highest number is the current one, and a record whose two numbers differ was torn by a crash or is being written.
"""

import errno
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import RunError
from penstock.ir import Action, decode
from penstock.launch.process_state import ELSEWHERE, host_id, process_state, start_ticks

STATUS_DIR_VARIABLE = "PENSTOCK_STATUS_DIR"
"""environment variable with the directory of the status files, set for launched ranks"""
# A power of two: the position of an entry in the ring is its number & _MASK, which is cheaper than a modulo.
NUM_RECENT = 256

ABSENT, STARTED, IDLE, PREPARING, SYNCING, WORKING, WAITING, ENDED, FAILED = (
    "absent",
    "started",
    "idle",
    "preparing",
    "syncing",
    "working",
    "waiting",
    "ended",
    "failed",
)
BUSY = (PREPARING, SYNCING, WORKING, WAITING)
"""states inside a step or another call: a process that is gone in one of them did not exit normally"""
SYNC_POINTS = (
    ("step", "the start of step {step}"),
    ("the end of step", "the end of step {step}"),
    ("eval", "eval before step {step}"),
    ("the end of eval", "the end of eval before step {step}"),
    ("the outputs of a step", "the outputs of step {step}"),
    ("forward", "the forward before step {step}"),
    ("drain", "the drain before step {step}"),
    ("the end of drain", "the end of the drain before step {step}"),
    ("the recordings of step", "the number of recordings for step {step}"),
    ("the recordings of eval", "the number of recordings for eval before step {step}"),
    ("the recordings of forward", "the number of recordings for the forward before step {step}"),
    ("the batch of step", "the comparison of batches for step {step}"),
    ("the batch of eval", "the comparison of batches for eval before step {step}"),
    ("the batch of forward", "the comparison of batches for the forward before step {step}"),
    ("the padding of step", "the comparison of losses without padding before step {step}"),
    ("the padding of eval", "the comparison of losses without padding before step {step}"),
    ("the shapes of a batch", "the shapes of the batch of step {step}"),
    ("clip_grad_norm_", "clip_grad_norm_ before step {step}"),
    ("unscale_", "unscale_ of the scaler before step {step}"),
    ("largest", "the comparison of values before step {step}"),
    ("full_state_dict", "full_state_dict before step {step}"),
    ("check_optimizer", "the comparison of optimizers before step {step}"),
    ("save", "the save before step {step}"),
    ("load", "the load before step {step}"),
    ("wait_for_save", "wait_for_save before step {step}"),
    ("forward_backward", "forward_backward of step {step}"),
    ("the end of a first step", "the end of step {step}"),
    ("Pipeline", "the construction of the Pipeline"),
)
"""calls that synchronise all ranks, each with its description in reports"""
_SYNC_CODES = {name: index for index, (name, _) in enumerate(SYNC_POINTS)}

_STATES = (STARTED, IDLE, WORKING, WAITING, ENDED, PREPARING, SYNCING)
_STARTED, _IDLE, _WORKING, _WAITING, _ENDED, _PREPARING, _SYNCING = range(len(_STATES))
_NONE = -1
_MAGIC = b"PENSTATE"
_HEADER = struct.Struct("<8sIIqqq")  # magic, rank, number of ranks, host, pid, start of the process
_ENTRY = struct.Struct("<qqqqiiq")  # sequence number, nanoseconds, step, code, state, peer, sequence number
_FAILURE = struct.Struct("<qq")  # nanoseconds, length of the text that follows
# Where the entries and the failure begin in the file, and the size of the file.
_RING = 64
_TEXT = _RING + NUM_RECENT * _ENTRY.size
_SIZE = 32768
MAX_FAILURE_BYTES = _SIZE - _TEXT - _FAILURE.size

# Names of the module are found faster than attributes, and the inner loop of a step uses these.
_pack = _ENTRY.pack_into
_clock = time.monotonic_ns
_LENGTH, _MASK = _ENTRY.size, NUM_RECENT - 1


@dataclass(frozen=True)
class StatusEntry:
    """One activity recorded by a rank."""

    state: str
    """`started`, `idle` between two steps, `preparing` one, `working` on an action, `waiting` for a message, `syncing`
    with all other ranks, or `ended`"""
    step: int = 0
    code: int | None = None
    """the action as its integer code; while syncing, the index into SYNC_POINTS"""
    peer: int | None = None
    """the rank whose message is awaited"""
    since: float = 0.0
    """when it began, in seconds of `time.monotonic`, a clock that all processes of a host share"""

    @property
    def action(self) -> str:
        """The action as text; empty if there is none."""
        return "" if self.code is None or self.state == SYNCING else action_text(self.code)

    @property
    def sync_point(self) -> str:
        """Description of the synchronisation this rank is waiting in; empty if it is not syncing."""
        if self.state != SYNCING or self.code is None:
            return ""
        is_known = 0 <= self.code < len(SYNC_POINTS)
        return (SYNC_POINTS[self.code][1] if is_known else "a call before step {step}").format(step=self.step)


@dataclass(frozen=True)
class RankStatus:
    """Contents of one rank's status file."""

    rank: int
    pid: int = 0
    process: str = ELSEWHERE
    """`running`, `stopped`, `gone`, or `elsewhere`: not a process of this host"""
    recent: tuple[StatusEntry, ...] = ()
    """the most recent entries, oldest first"""
    failure: str = ""
    """an ErrorReport as JSON; empty if the rank has not failed"""

    @property
    def now(self) -> StatusEntry:
        """The last entry; `absent` if there is none."""
        return self.recent[-1] if self.recent else StatusEntry(ABSENT)

    @property
    def state(self) -> str:
        """`failed`, or the state of the last entry."""
        return FAILED if self.failure else self.now.state


class StatusFile:
    """This rank's own status file, for writing; recording an entry costs about half a microsecond."""

    def __init__(self, directory: Path, rank: int, content: mmap.mmap) -> None:
        self.directory = directory
        self.rank = rank
        self._content = content
        records = _records(content)
        # The number of the last entry.
        self._number = records[-1][0] if records else 0

    @classmethod
    def create(cls, directory: str | Path, rank: int, ranks: int) -> "StatusFile":
        """Open this rank's file for writing; entries that this same process recorded before are kept.

        Within one process every call returns the same object: two with separate sequence numbers would overwrite each
        other's entries.
        """
        directory = Path(directory)
        key = (os.getpid(), os.fspath(directory.absolute()), rank)
        known = _OPEN.get(key)
        # A forked child inherits the table, and a run may have been cleared: then the file is not ours any more.
        if known is not None and known._belongs_to_this_process(ranks):
            return known
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = _map_for_writing(_path(directory, rank))
        except OSError as problem:
            error = RunError(
                "a rank cannot write its status file",
                file=_path(directory, rank),
                reason=problem.strerror or problem,
                hint="room in --out and in the directory of PENSTOCK_SCRATCH, and no limit on file sizes (ulimit -f)",
            )
            error.is_final = True  # a restart would fail the same way
            raise error from None
        status = cls(directory, rank, content)
        if not status._belongs_to_this_process(ranks):
            status._content[:] = bytes(_SIZE)
            _HEADER.pack_into(status._content, 0, *_header(rank, ranks))
            status._number = 0
        if not status._number:
            status._record(_STARTED, 0)
        _OPEN[key] = status
        return status

    def _belongs_to_this_process(self, ranks: int) -> bool:
        """Whether the file still exists and this process has written its header."""
        exists = _path(self.directory, self.rank).exists()
        return exists and _HEADER.unpack_from(self._content) == _header(self.rank, ranks)

    @staticmethod
    def opened() -> "list[StatusFile]":
        """The files that this process writes."""
        return [status for (pid, *_), status in _OPEN.items() if pid == os.getpid()]

    @staticmethod
    def clear(directory: str | Path) -> None:
        """Remove the files of an earlier run."""
        for path in _paths(directory):
            path.unlink(missing_ok=True)

    @staticmethod
    def read(directory: str | Path) -> tuple[RankStatus, ...]:
        """The status of every rank, in order; a rank without a file is `absent`."""
        readers = [reader for reader in map(StatusReader.open, _paths(directory)) if reader]
        statuses = {reader.rank: reader.status() for reader in readers}
        ranks = max((reader.ranks for reader in readers), default=0)
        return tuple(statuses.get(rank, RankStatus(rank)) for rank in range(ranks))

    def preparing(self, step: int) -> None:
        """Record that this rank was called for a step and prepares it."""
        self._record(_PREPARING, step)

    def syncing(self, step: int, sync_point: int) -> None:
        """Record that this rank waits for all others; `sync_point` is an index into SYNC_POINTS."""
        self._record(_SYNCING, step, sync_point)

    # The two calls of the inner loop are written out, because a shared helper would double their cost.

    def working(self, step: int, code: int) -> None:
        """Record that this rank is about to run an action."""
        self._number = number = self._number + 1
        _pack(self._content, _RING + (number & _MASK) * _LENGTH, number, _clock(), step, code, _WORKING, _NONE, number)

    def waiting(self, step: int, code: int, peer: int) -> None:
        """Record that this rank is blocked on the message `code` from rank `peer`."""
        self._number = number = self._number + 1
        _pack(self._content, _RING + (number & _MASK) * _LENGTH, number, _clock(), step, code, _WAITING, peer, number)

    def idle(self, step: int) -> None:
        """Record that this rank is between two steps; `step` is the one that ended."""
        self._record(_IDLE, step)

    def ended(self) -> None:
        """Record that this rank has finished its function."""
        self._record(_ENDED, self.now.step)

    def failed(self, text: str) -> None:
        """Store the ErrorReport of a failure as JSON. The first failure is kept; a text that is too long is cut."""
        # Later failures are usually consequences of the first one.
        if not _failure(self._content):
            data = text.encode()[:MAX_FAILURE_BYTES].decode(errors="ignore").encode()
            start = _TEXT + _FAILURE.size
            # The length is written last, so that a reader never sees half a text.
            self._content[start : start + len(data)] = data
            _FAILURE.pack_into(self._content, _TEXT, _clock(), len(data))

    def recovered(self) -> None:
        """Clear the failure: the caller has handled it, and other ranks need not stop."""
        _FAILURE.pack_into(self._content, _TEXT, 0, 0)

    @property
    def failure(self) -> str:
        """The stored failure; empty if there is none."""
        return _failure(self._content)

    @property
    def waiting_seconds(self) -> float:
        """How long this rank has waited for a message or for all others, 0 if it is doing something else."""
        now = self.now
        return time.monotonic() - now.since if now.state in (WAITING, SYNCING) else 0.0

    @property
    def now(self) -> StatusEntry:
        """The last entry."""
        return _entry(_ENTRY.unpack_from(self._content, _RING + (self._number & _MASK) * _LENGTH))

    def _record(self, state: int, step: int, code: int = _NONE) -> None:
        self._number = number = self._number + 1
        _pack(self._content, _RING + (number & _MASK) * _LENGTH, number, _clock(), step, code, state, _NONE, number)


class StatusReader:
    """Any rank's status file, for reading; it stays mapped, so that repeated reads are cheap."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        _, self.rank, self.ranks, *_ = _HEADER.unpack_from(content)
        self._last_entries = content[_RING:_TEXT]

    @classmethod
    def open(cls, path: Path) -> "StatusReader | None":
        """Open a file; None if it is missing, incomplete, or not a status file."""
        try:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return None
        return cls(content) if content[: len(_MAGIC)] == _MAGIC else None

    @classmethod
    def of(cls, directory: Path, rank: int) -> "StatusReader | None":
        """Open the file of one rank; None if there is none."""
        return cls.open(_path(directory, rank))

    @property
    def process(self) -> str:
        """`running`, `stopped`, `gone`, or `elsewhere` for a process of another host that shares this directory."""
        *_, host, pid, ticks = _HEADER.unpack_from(self._content)  # read again: a restarted rank reuses the file
        return process_state(pid, ticks) if host == host_id() else ELSEWHERE

    @property
    def failure(self) -> str:
        """The stored failure; empty if there is none."""
        return _failure(self._content)

    def has_changed(self) -> bool:
        """Whether the rank has recorded anything since the last call, and so was alive; costs no system call."""
        before, self._last_entries = self._last_entries, self._content[_RING:_TEXT]
        return self._last_entries != before

    def status(self) -> RankStatus:
        """Everything in the file."""
        *_, pid, _ = _HEADER.unpack_from(self._content)
        recent = tuple(_entry(record) for record in _records(self._content) if 0 <= record[4] < len(_STATES))
        return RankStatus(self.rank, pid, self.process, recent, self.failure)


_OPEN: dict[tuple[int, str, int], StatusFile] = {}
"""by process, directory and rank"""


def status_directory() -> Path | None:
    """The directory of the status files that the launcher made; None if this process was not launched."""
    return Path(os.environ[STATUS_DIR_VARIABLE]) if STATUS_DIR_VARIABLE in os.environ else None


def sync_point_code(name: str) -> int:
    """Index of a call in SYNC_POINTS; one past the end for a name that is not listed."""
    return _SYNC_CODES.get(name, len(SYNC_POINTS))


def action_of(code: int) -> Action | None:
    """The action of an integer code; None if the code is invalid."""
    try:
        return decode(np.array([code], dtype=np.int64))[0]
    except ValueError:
        return None


def action_text(code: int) -> str:
    """The action of an integer code as text."""
    action = action_of(code)
    return f"code {code}" if action is None else str(action)


def _header(rank: int, ranks: int) -> tuple[bytes, int, int, int, int, int]:
    # With the start of the process, because the system reuses pids.
    return _MAGIC, rank, ranks, host_id(), os.getpid(), start_ticks(os.getpid())


def _map_for_writing(path: Path) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Reserve the space now: writing to a mapped page for which the disk has no room would kill the process.
        try:
            os.posix_fallocate(handle, 0, _SIZE)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) == errno.ENOSPC:
                raise
            os.ftruncate(handle, _SIZE)  # file systems and platforms without fallocate
        return mmap.mmap(handle, _SIZE)
    finally:
        os.close(handle)


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank:05d}.status"


def _paths(directory: str | Path) -> list[Path]:
    return sorted(Path(directory).glob("rank*.status"))


def _failure(content: mmap.mmap) -> str:
    _, length = _FAILURE.unpack_from(content, _TEXT)
    start = _TEXT + _FAILURE.size
    return content[start : start + length].decode(errors="replace") if 0 < length <= MAX_FAILURE_BYTES else ""


def _records(content: mmap.mmap) -> list[tuple[int, ...]]:
    # A record that was being written while the first copy was made differs in the second one.
    first, second = content[_RING:_TEXT], content[_RING:_TEXT]
    pairs = zip(_ENTRY.iter_unpack(first), _ENTRY.iter_unpack(second), strict=True)
    return sorted(record for record, again in pairs if record == again and record[0] == record[-1] > 0)


def _entry(record: tuple[int, ...]) -> StatusEntry:
    _, nanoseconds, step, code, state, peer, _ = record
    has_code = state in (_WORKING, _WAITING, _SYNCING)
    return StatusEntry(_STATES[state], step, code if has_code else None, peer if peer >= 0 else None, nanoseconds / 1e9)
