"""Injection: faults happen on this rank, at what it notes on its board or at the files that it writes."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from penstock.launch.board import Board
from penstock.launch.faults import ABORT, EXIT, FULL_DISK, KILL, RAISE, SLOW, STOP, Fault

_NOTES = ("preparing", "meeting", "working", "waiting", "idle")
_FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
_OPEN = "open"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
"""flags of opening a file that need room; who only reads or clears away finds a full disk no different"""


class InjectedError(Exception):
    """The exception of a fault that raises."""


class Injection:
    """The faults of one rank in one life; each happens once."""

    def __init__(self, faults: Iterable[Fault], draft: str) -> None:
        """`draft` is what the names of unfinished checkpoints begin with."""
        self._left = list(faults)
        self._draft = draft
        self._step, self._num_notes, self._num_files = -1, 0, 0
        self._pause_seconds = 0.0
        self._began = time.monotonic()

    def begin(self) -> None:
        """From now on faults happen."""
        for board in Board.opened():
            for name in _NOTES:
                setattr(board, name, self._disturbed(getattr(board, name)))
        sys.addaudithook(self._heard)

    def _disturbed(self, note: Callable[..., None]) -> Callable[..., None]:
        def disturbed(step: int, *rest: int) -> None:
            note(step, *rest)
            self._noted(step)

        return disturbed

    def _noted(self, step: int) -> None:
        self._num_notes = self._num_notes + 1 if step == self._step else 0
        self._step = step
        for fault in list(self._left):
            if fault.kind != FULL_DISK and self._is_due(fault):
                self._happen(fault)
        if self._pause_seconds:
            time.sleep(self._pause_seconds)

    def _is_due(self, fault: Fault) -> bool:
        if fault.after is not None:
            return time.monotonic() - self._began >= fault.after
        # Some steps have fewer notes on some ranks: then it is the first one after them.
        is_there = fault.step is not None and (self._step, self._num_notes) >= (fault.step, fault.action)
        return is_there and fault.save is None

    def _heard(self, event: str, values: tuple[Any, ...]) -> None:
        if event not in _FILE_EVENTS or not self._left or not isinstance(values[0], str | os.PathLike):
            return
        path = os.fspath(values[0])
        if self._draft not in path:
            return
        self._num_files += 1
        for fault in list(self._left):
            is_of_step = fault.step is not None and f"-{fault.step:06d}-" in path
            if fault.kind == FULL_DISK and is_of_step and event == _OPEN and values[2] & _WRITES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            if fault.save is not None and self._num_files >= fault.save:
                self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        self._left.remove(fault)
        if fault.kind in (KILL, ABORT, STOP):
            number = {KILL: signal.SIGKILL, ABORT: signal.SIGABRT, STOP: signal.SIGSTOP}[fault.kind]
            os.kill(os.getpid(), number)
        if fault.kind == EXIT:
            os._exit(1)
        if fault.kind == RAISE:
            raise InjectedError(f"a fault was asked for: {fault.kind} on rank {fault.rank}")
        if fault.kind == SLOW:
            self._pause_seconds = fault.seconds
