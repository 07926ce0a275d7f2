"""The processes of one launch: started together, listened to, and ended together."""

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.launch.rank import Job, Seat, serve

_TERM_SECONDS, _KILL_SECONDS = 0.5, 5.0
_LOOK_SECONDS = 0.01
_FORKING = threading.Lock()


class Member:
    """One rank as the launcher sees it."""

    def __init__(self, rank: int, process: BaseProcess, line: Connection) -> None:
        self.rank = rank
        self.process = process
        self.line = line
        self.is_silent = False

    def hear(self) -> tuple[bytes, bytes] | None:
        """The kind and content of the rank's report, None if it has not made one."""
        try:
            if self.is_silent or not self.line.poll():
                return None
            return self.line.recv_bytes(), self.line.recv_bytes()
        except (EOFError, OSError):
            self.is_silent = True
            return None

    def signal(self, number: int) -> None:
        """Signal the rank and all that it has started."""
        pid = self.process.pid or 0
        for send in (os.killpg, os.kill) if pid else ():
            try:
                send(pid, number)
            except (ProcessLookupError, PermissionError):
                continue


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside nothing is collected, nor in a process that is forked inside until it has set apart what it inherited."""
    with _FORKING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class Processes:
    """All ranks; they are started by a thread that has never computed anything and lives as long as they do.

    A forked process inherits the thread that forked it: one that ran OpenMP loops would wait for helpers that only
    exist in the parent. And a rank dies with the thread that started it, so the thread must stay.
    """

    def __init__(self, start: str) -> None:
        self.members: list[Member] = []
        self._context: Any = get_context(start)
        self._started, self._closed = threading.Event(), threading.Event()
        self._trouble: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def start(self, seats: Sequence[Seat], job: "Job | bytes") -> None:
        """Start one process per seat."""
        self._thread = threading.Thread(target=self._start_all, args=(seats, job), name="penstock-launch", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._trouble:
            raise self._trouble[0]

    def stop(self) -> None:
        """End every process that is left: politely first, then surely, also those that are stopped."""
        self._closed.set()
        if self._thread:
            self._started.wait()
        for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            for member in self.members:
                member.signal(number)
            if self.wait(seconds):
                break
        for member in self.members:
            member.signal(signal.SIGKILL)  # what a rank has started may outlive it
        self._forget()

    def release(self, seconds: float) -> None:
        """Let the ranks go, each of which has delivered its result."""
        for member in self.members:
            try:
                member.line.send_bytes(b"thanks")
            except OSError:
                continue
        if self.wait(seconds):
            self._forget()
        else:
            self.stop()

    def wait(self, seconds: float) -> bool:
        """Whether all processes have ended within so many seconds."""
        end = time.monotonic() + seconds
        while any(member.process.exitcode is None for member in self.members):
            if time.monotonic() > end:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _start_all(self, seats: Sequence[Seat], job: "Job | bytes") -> None:
        try:
            for seat in seats:
                if not self._closed.is_set():
                    self.members.append(self._start_one(seat, job))
        except BaseException as error:
            self._trouble.append(error)
        self._started.set()
        self._closed.wait()

    def _start_one(self, seat: Seat, job: "Job | bytes") -> Member:
        here, there = self._context.Pipe()
        process = self._context.Process(target=serve, args=(seat, there, job), name=f"rank {seat.rank}")
        with warnings.catch_warnings(), _uncollected():
            # Newer Pythons warn of forks beside threads; the ranks use nothing that another thread could hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        there.close()
        return Member(seat.rank, process, here)

    def _forget(self) -> None:
        self._closed.set()
        for member in self.members:
            member.line.close()
            if member.process.exitcode is not None:
                member.process.close()
        self.members.clear()
        if self._thread:
            self._thread.join()
