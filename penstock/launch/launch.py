"""launch: run a function on several local processes joined by torch.distributed, and return what it returned."""

import os
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.ir import is_finite
from penstock.launch import parcels, verdict
from penstock.launch.board import Board
from penstock.launch.failure import Failure
from penstock.launch.processes import Member, Processes
from penstock.launch.rank import FAILURE, Seat
from penstock.launch.scratch import scratch_directory

STARTS = ("fork", "spawn")
_LOOK_SECONDS = 0.1  # how often the processes are counted; reports and most deaths are seen at once
_SETTLE_SECONDS = 0.3  # how long after a failure the others may still tell theirs, which may be the earlier one
_CAUSE_SECONDS = 3.0  # the same while nothing is known but that others lost contact: a large process is long in dying
_LEAVE_SECONDS = 5.0  # how long a rank that has delivered may take to end


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    start: str = "fork",
    threads: int = 1,
    timeout: float | None = None,
    board: str | Path | None = None,
) -> list[Any]:
    """Run `fn(*args)` on so many local processes joined by torch.distributed; the results, by rank.

    The processes are copies of this one, so any function will do, and what `fn` and `args` hold is there at once.
    `start="spawn"` starts fresh ones instead (always so once CUDA is in use here): then `fn` must be importable. They
    speak over loopback only. `threads` is what torch may use in each, `timeout` the seconds for all, `board` a
    directory in which the notes of the ranks stay. Whatever breaks, every process is ended before this returns.
    """
    _check(fn, ranks, start, threads, timeout, board)
    start = "spawn" if torch.cuda.is_initialized() else start  # type: ignore[no-untyped-call]
    job = _packed(fn, args) if start == "spawn" else (fn, args)
    with scratch_directory() as directory:
        boards = Path(board) if board else directory / "board"
        Board.clear(boards)
        store = os.fspath(directory / "store")
        seats = [Seat(rank, ranks, threads, store, os.fspath(boards), os.getpid()) for rank in range(ranks)]
        processes = Processes(start)
        try:
            processes.start(seats, job)
            results = _Listener(processes.members, boards, timeout).results()
            processes.release(_LEAVE_SECONDS)
        finally:
            processes.stop()
    return results


class _Listener:
    """Collects the reports of the ranks until all are there, one broke, or time is up."""

    def __init__(self, members: list[Member], boards: Path, timeout: float | None) -> None:
        self._members = members
        self._boards = boards
        self._timeout = timeout
        self._parcels: dict[int, bytes] = {}
        self._failures: list[Failure] = []
        self._began = self._looked = time.monotonic()

    def results(self) -> list[Any]:
        """The results by rank; RunError if there cannot be all of them."""
        waiting = list(self._members)
        while waiting and not self._failures:
            self._listen(waiting, _LOOK_SECONDS)
            waiting = self._without_report()
            if self._timeout and time.monotonic() - self._began > self._timeout and not self._failures and waiting:
                raise verdict.overdue(Board.read(self._boards), time.monotonic(), self._timeout)
        if self._failures:
            raise self._verdict()
        return [_unpacked(rank, parcel) for rank, parcel in sorted(self._parcels.items())]

    def _verdict(self) -> RunError:
        statuses, now = Board.read(self._boards), time.monotonic()
        while (waiting := self._without_report()) and time.monotonic() - now < self._patience:
            self._listen(waiting, _SETTLE_SECONDS / 10)
        silent = {member.rank for member in waiting}
        noted = [status for status in Board.read(self._boards) if status.rank in silent and status.failure]
        self._failures += [Failure.from_board(status.rank, status.failure) for status in noted]
        return verdict.broken(self._failures, statuses, now)

    @property
    def _patience(self) -> float:
        """How long more may be heard: where ranks only lost contact, the death that they felt is still to be seen."""
        return _CAUSE_SECONDS if all(failure.follows for failure in self._failures) else _SETTLE_SECONDS

    def _without_report(self) -> list[Member]:
        told = {*self._parcels, *(failure.rank for failure in self._failures)}
        return [member for member in self._members if member.rank not in told]

    def _listen(self, waiting: list[Member], seconds: float) -> None:
        lines = [member.line for member in waiting if not member.is_silent]
        connection.wait([*lines, *(member.process.sentinel for member in waiting)], seconds)
        for member in waiting:
            code = member.process.exitcode  # asked first: what it reported before it ended is still to be heard
            if report := member.hear():
                self._take(member.rank, *report)
            elif code is not None:
                self._failures.append(self._ended(member.rank, code))
        self._looked = time.monotonic()

    def _take(self, rank: int, kind: bytes, content: bytes) -> None:
        if kind == FAILURE:
            self._failures.append(Failure.from_board(rank, content.decode()))
        else:
            self._parcels[rank] = content

    def _ended(self, rank: int, code: int) -> Failure:
        noted = next((status.failure for status in Board.read(self._boards) if status.rank == rank), "")
        # Neighbours notice a death at once, perhaps before it is seen here: it counts from when the rank last lived.
        return Failure.from_board(rank, noted) if noted else verdict.sudden(rank, code, self._looked)


def _check(fn: object, ranks: object, start: object, threads: object, timeout: Any, board: object) -> None:
    if not callable(fn):
        raise RunError("launch runs a function", given=type(fn).__name__, hint="launch(train, 4, model, data)")
    for name, number in (("ranks", ranks), ("threads", threads)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RunError(f"{name} is a whole number above 0", given=repr(number))
    if not isinstance(start, str) or start not in STARTS:
        raise RunError("a process can be started in two ways", start=repr(start), known=", ".join(STARTS))
    if timeout is not None and not (is_finite(timeout) and timeout > 0):
        raise RunError("timeout is a number of seconds above 0", given=repr(timeout), hint="60.0, or None for no limit")
    if board is not None and not isinstance(board, str | Path):
        raise RunError("board is a directory", given=repr(board))
    if dist.is_available() and dist.is_initialized():
        raise RunError(
            "torch.distributed is already initialised in this process",
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            hint="call the function itself (this process is a rank), or dist.destroy_process_group() first",
        )


def _packed(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return parcels.pack((fn, args))
    except Exception as error:
        raise RunError(
            "the function or its arguments cannot be sent to a fresh process",
            reason=f"{type(error).__name__}: {error}",
            hint='a function at the top of a module, or start="fork"',
        ) from error


def _unpacked(rank: int, parcel: bytes) -> Any:
    try:
        return parcels.unpack(parcel)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        hint = "return plain values, tensors or state dicts"
        raise RunError("the result of a rank cannot be read here", rank=rank, reason=reason, hint=hint) from error
