"""Workers: long-lived processes of torch.distributed that run jobs for many tests, one pool per number of ranks."""

import contextlib
import faulthandler
import importlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import RunError
from penstock.launch import StatusFile, explain_hang, launch, serialization

DEADLINE_SECONDS = 120.0
_START_SECONDS = 60.0
_LEAVE_SECONDS = 10.0
_STACK_SECONDS = 1.0


class Patience:
    """A deadline that counts seconds in which this process ran: if the machine stood still, nobody is late for it."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._seen = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the time is up; to be asked again and again."""
        now = time.monotonic()
        self._left -= min(now - self._seen, 1.0)
        self._seen = now
        return self._left < 0


class Pool:
    """The ranks of one process group; `run` gives all of them the same job."""

    def __init__(self, ranks: int, directory: Path) -> None:
        self._boards = directory
        pairs = [Pipe() for _ in range(ranks)]
        self._lines = [here for here, _ in pairs]
        self._there = [there for _, there in pairs]
        self._thread = threading.Thread(target=self._launch, name=f"pool of {ranks}", daemon=True)
        self._pids: list[int] = []
        self._thread.start()
        self._pids = self._answers(Patience(_START_SECONDS))

    def _launch(self) -> None:
        # Of a pool that was killed, the test that did it has already said why.
        with contextlib.suppress(RunError):
            launch(serve, len(self._lines), self._there, os.fspath(self._boards), status_dir=self._boards)

    def run(self, fn: Callable[..., Any], *args: Any, deadline: float = DEADLINE_SECONDS) -> list[Any]:
        """What `fn(*args)`, a function at the top of a module, returns on every rank."""
        job = serialization.pack((fn.__module__, fn.__qualname__, args))
        for line in self._lines:
            line.send_bytes(job)
        return self._answers(Patience(deadline))

    @property
    def is_alive(self) -> bool:
        """Whether it can take another job."""
        return self._thread.is_alive() and not self._lines[0].closed

    def close(self) -> None:
        """Let the ranks go."""
        if self.is_alive:
            for line in self._lines:
                line.send_bytes(serialization.pack(None))
            self._thread.join(_LEAVE_SECONDS)
        self._kill()

    def _answers(self, end: Patience) -> list[Any]:
        """The results of all ranks; a rank that fails or is late ends the pool, whose messages no longer match."""
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < len(self._lines) and all(is_done for is_done, _ in found.values()):
            self._listen(found, end)
        wrong = [f"rank {rank}:\n{text}" for rank, (is_done, text) in found.items() if not is_done]
        if wrong:
            self._kill()
            pytest.fail("\n".join(wrong), pytrace=False)
        return [found[rank][1] for rank in range(len(self._lines))]

    def _listen(self, found: dict[int, tuple[bool, Any]], end: Patience) -> None:
        for rank, line in enumerate(self._lines):
            try:
                if rank not in found and line.poll(0.005):
                    found[rank] = serialization.unpack(line.recv_bytes())
            except (EOFError, OSError):
                found[rank] = (False, f"ended\n{self._report()}")
        late = [rank for rank in range(len(self._lines)) if rank not in found]
        if end.is_over and late:
            found[late[0]] = (False, f"not done in time\n{self._report()}\n{self._stacks(late)}")

    def _report(self) -> str:
        return explain_hang(StatusFile.read(self._boards), time.monotonic())

    def _stacks(self, late: list[int]) -> str:
        """Where those that are late are."""
        for rank in late if self._pids else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return "\n".join(
            f"stacks of {path.name}:\n{path.read_text()}" for path in sorted(self._boards.glob("rank*.stacks"))
        )

    def _kill(self) -> None:
        for pid in self._pids if self._thread.is_alive() else ():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for line in self._lines:
            line.close()
        self._thread.join(_LEAVE_SECONDS)


def serve(lines: list[Connection], directory: str) -> None:
    """What every rank of a pool does until it is given nothing."""
    rank = int(os.environ["RANK"])
    # Kept open as long as the process lives: a rank that is asked where it is writes it there.
    stacks = Path(directory, f"rank{rank}.stacks").open("w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ["PENSTOCK_WATCH"] = "0"
    for other, line in enumerate(lines):
        if other != rank:
            line.close()
    line = lines[rank]
    line.send_bytes(serialization.pack((True, os.getpid())))
    while job := serialization.unpack(line.recv_bytes()):
        module, name, args = job
        try:
            answer = (True, getattr(importlib.import_module(module), name)(*args))
        except Exception:
            answer = (False, traceback.format_exc())
        line.send_bytes(serialization.pack(answer))


class Pools:
    """The pools of a test session, made when they are first needed, and anew after one broke."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[int, Pool] = {}
        self._number = 0

    def __getitem__(self, ranks: int) -> Pool:
        if ranks not in self._made or not self._made[ranks].is_alive:
            self._number += 1
            self._made[ranks] = Pool(ranks, self._directory / str(self._number))
        return self._made[ranks]

    def close(self) -> None:
        """Let all of them go."""
        for pool in self._made.values():
            pool.close()
