"""Pools of torch.distributed processes that run jobs for many tests, one pool per number of ranks."""

import contextlib
import faulthandler
import importlib
import os
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from penstock.errors import RunError
from penstock.launch import StatusFile, explain_hang, launch, serialization

DEADLINE_SECONDS = 120.0
_START_SECONDS = 60.0
_EXIT_SECONDS = 10.0
_POLL_SECONDS = 0.1
_STACK_SECONDS = 1.0


class Deadline:
    """A deadline that counts only time in which this process ran, not time in which the machine stood still."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._seen = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the time is up; to be polled."""
        now = time.monotonic()
        self._left -= min(now - self._seen, 1.0)
        self._seen = now
        return self._left < 0


class Pool:
    """The ranks of one process group; `run` gives all of them the same job.

    Between jobs the processes are stopped: every process group that they have made has threads that wake up 100 times a
    second.
    """

    def __init__(self, ranks: int, directory: Path) -> None:
        self._directory = directory
        pairs = [Pipe() for _ in range(ranks)]
        self._connections = [parent for parent, _ in pairs]
        self._worker_ends = [worker for _, worker in pairs]
        self._thread = threading.Thread(target=self._launch, name=f"pool of {ranks}", daemon=True)
        self._pids: list[int] = []
        self._thread.start()
        self._pids = self._results(Deadline(_START_SECONDS))
        self._signal(signal.SIGSTOP)

    def _launch(self) -> None:
        # A pool that was killed has already failed the test that did it.
        with contextlib.suppress(RunError):
            launch(
                serve, len(self._connections), self._worker_ends, os.fspath(self._directory), status_dir=self._directory
            )

    def run(self, fn: Callable[..., Any], *args: Any, deadline: float = DEADLINE_SECONDS) -> list[Any]:
        """The results of `fn(*args)`, a function at the top of a module, on every rank."""
        job = serialization.pack((fn.__module__, fn.__qualname__, args))
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send_bytes(job)
        results = self._results(Deadline(deadline))
        self._signal(signal.SIGSTOP)
        return results

    @property
    def is_alive(self) -> bool:
        """Whether the pool can run another job."""
        return self._thread.is_alive() and not self._connections[0].closed

    def close(self) -> None:
        """End the processes."""
        if self.is_alive:
            self._signal(signal.SIGCONT)
            for connection in self._connections:
                connection.send_bytes(serialization.pack(None))
            self._thread.join(_EXIT_SECONDS)
        self._kill()

    def _results(self, deadline: Deadline) -> list[Any]:
        """The results of all ranks; a rank that fails or is late ends the pool, whose messages no longer match."""
        found: dict[int, tuple[bool, Any]] = {}
        while len(found) < len(self._connections) and all(is_done for is_done, _ in found.values()):
            self._poll(found, deadline)
        failures = [f"rank {rank}:\n{text}" for rank, (is_done, text) in found.items() if not is_done]
        if failures:
            self._kill()
            pytest.fail("\n".join(failures), pytrace=False)
        return [found[rank][1] for rank in range(len(self._connections))]

    def _poll(self, found: dict[int, tuple[bool, Any]], deadline: Deadline) -> None:
        waiting = {connection: rank for rank, connection in enumerate(self._connections) if rank not in found}
        for connection in wait(waiting, _POLL_SECONDS):
            rank = waiting[connection]
            try:
                found[rank] = serialization.unpack(connection.recv_bytes())
            except (EOFError, OSError):
                found[rank] = (False, f"ended\n{self._report()}")
        late = [rank for rank in range(len(self._connections)) if rank not in found]
        if deadline.is_over and late:
            found[late[0]] = (False, f"not done in time\n{self._report()}\n{self._stacks(late)}")

    def _report(self) -> str:
        return explain_hang(StatusFile.read(self._directory), time.monotonic())

    def _stacks(self, late: list[int]) -> str:
        """The stacks of the late ranks."""
        self._signal(signal.SIGUSR1, late)
        time.sleep(_STACK_SECONDS)
        return "\n".join(
            f"stacks of {path.name}:\n{path.read_text()}" for path in sorted(self._directory.glob("rank*.stacks"))
        )

    def _signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Signal some or all ranks; after the pool has ended, their pids may be those of others."""
        for rank, pid in enumerate(self._pids if self._thread.is_alive() else ()):
            if ranks is None or rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for connection in self._connections:
            connection.close()
        self._thread.join(_EXIT_SECONDS)


def serve(connections: list[Connection], directory: str) -> None:
    """Run jobs on a rank of a pool until an empty one arrives."""
    rank = int(os.environ["RANK"])
    # Kept open as long as the process lives: on SIGUSR1 the rank writes its stacks there.
    stacks = Path(directory, f"rank{rank}.stacks").open("w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ["PENSTOCK_WATCH"] = "0"
    for other, connection in enumerate(connections):
        if other != rank:
            connection.close()
    connection = connections[rank]
    connection.send_bytes(serialization.pack((True, os.getpid())))
    groups = ReusedGroups()
    while job := serialization.unpack(connection.recv_bytes()):
        module, name, args = job
        groups.begin_job()
        # The models of a job must not depend on the jobs before it.
        torch.manual_seed(0)
        try:
            result = (True, getattr(importlib.import_module(module), name)(*args))
        except Exception:
            result = (False, traceback.format_exc())
        connection.send_bytes(serialization.pack(result))


class ReusedGroups:
    """Gives a job the process groups that an earlier job made for the same ranks, instead of new ones.

    Each group has threads that wake up 100 times a second: those of a hundred jobs would slow the tests down. The nth
    group that a job makes of some ranks is the nth of the earlier job, so that no two of its groups become one.
    """

    def __init__(self) -> None:
        self._new_group = dist.new_group
        self._groups: dict[tuple[Any, ...], list[Any]] = {}
        self._num_used: Counter[tuple[Any, ...]] = Counter()
        dist.new_group = device_mesh.new_group = self.new_group

    def begin_job(self) -> None:
        """Make all groups available again."""
        self._num_used.clear()

    def new_group(self, ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.distributed.new_group`."""
        kind = (None if ranks is None else tuple(ranks), args, *sorted(kwargs.items()))
        known = self._groups.setdefault(kind, [])
        if self._num_used[kind] == len(known):
            known.append(self._new_group(ranks, *args, **kwargs))
        self._num_used[kind] += 1
        return known[self._num_used[kind] - 1]


class Pools:
    """The pools of a test session, created when first needed, and again after a failure."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pools: dict[int, Pool] = {}
        self._number = 0

    def __getitem__(self, ranks: int) -> Pool:
        if ranks not in self._pools or not self._pools[ranks].is_alive:
            self._number += 1
            self._pools[ranks] = Pool(ranks, self._directory / str(self._number))
        return self._pools[ranks]

    def close(self) -> None:
        """End all pools."""
        for pool in self._pools.values():
            pool.close()
