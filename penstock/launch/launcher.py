"""`launch`: run a function on several local processes joined by torch.distributed, and return their results."""

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.ir import choices_text, is_finite
from penstock.launch import serialization
from penstock.launch.reports import ErrorReport, exit_report, launch_error, one_line, timeout_error
from penstock.launch.scratch import scratch_directory
from penstock.launch.status_file import StatusFile
from penstock.launch.worker import FAILURE, Job, WorkerConfig, run_worker

START_METHODS = ("fork", "spawn")
_POLL_SECONDS = 0.1  # how often exit codes are polled; messages and most deaths wake the launcher at once
_SETTLE_SECONDS = 0.3  # after a failure, how long other ranks may still report theirs, which may be the earlier one
_CAUSE_SECONDS = 3.0  # the same while only lost contacts are reported: a large process takes long to die
_EXIT_SECONDS = 5.0  # how long a rank that has delivered its result may take to exit
_TERM_SECONDS, _KILL_SECONDS = 0.5, 15.0  # on a busy machine a large process may take seconds to end
_FORKING = threading.Lock()


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    start: str = "fork",
    threads: int = 1,
    timeout: float | None = None,
    status_dir: str | Path | None = None,
) -> list[Any]:
    """Run a function on several local processes joined by torch.distributed.

    Communication uses the loopback interface only. Every process has ended when this returns or raises.

    Args:
        fn: called on every rank; processes are forked, so that it may be any function and needs no import
        ranks: number of processes
        *args: arguments of `fn`
        start: "fork", or "spawn" for fresh processes (always used once CUDA is initialised here): then `fn` must be
            importable
        threads: number of torch threads per process
        timeout: limit in seconds for the whole call; None: no limit
        status_dir: a directory in which the status files of the ranks are kept, for `penstock why-hung`

    Returns:
        The results by rank.

    Raises:
        RunError: if a rank failed, died or did not end in time; it shows the error of that rank
    """
    _check_arguments(fn, ranks, start, threads, timeout, status_dir)
    # A forked process cannot use CUDA once its parent has.
    start = "spawn" if torch.cuda.is_initialized() else start
    job: Job | bytes = (fn, args)
    if start == "spawn":
        try:
            job = serialization.pack((fn, args))
        except Exception as error:
            raise RunError(
                "the function or its arguments cannot be sent to a fresh process",
                reason=one_line(error),
                hint='a function at the top level of a module, or start="fork"',
            ) from error
    with scratch_directory() as directory:
        statuses = Path(status_dir) if status_dir else directory / "status"
        StatusFile.clear(statuses)  # of an earlier run with the same directory
        store = os.fspath(directory / "store")
        configs = [WorkerConfig(rank, ranks, threads, store, os.fspath(statuses), os.getpid()) for rank in range(ranks)]
        workers = _Workers(start)
        try:
            workers.start(configs, job)
            results = _Collector(workers.members, statuses, timeout).results()
            workers.release(_EXIT_SECONDS)
        finally:
            workers.stop()
    return results


class _Worker:
    """The launcher's handles of one rank: its process, and the pipe that its result comes through."""

    def __init__(self, rank: int, process: BaseProcess, pipe: Connection) -> None:
        self.rank, self.process, self.pipe = rank, process, pipe
        self.is_closed = False

    def receive(self) -> tuple[bytes, bytes] | None:
        """Kind and content of the rank's message; None if none has arrived."""
        try:
            if self.is_closed or not self.pipe.poll():
                return None
            return self.pipe.recv_bytes(), self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.is_closed = True
            return None

    def signal(self, number: int) -> None:
        """Signal the rank and all its children."""
        pid = self.process.pid
        # killpg fails while the child has not yet called setpgid, so the process itself is signalled as well.
        for send in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                send(pid, number)


class _Workers:
    """All processes of one launch. A thread of its own starts them, and exits after them.

    A forked process inherits the thread that forked it. A thread that has run OpenMP loops would wait for helper
    threads that exist only in the parent; this one has never computed anything. It stays because a rank is killed when
    the thread that started it ends (`die_with_parent`).
    """

    def __init__(self, start: str) -> None:
        self.members: list[_Worker] = []
        self._context: Any = get_context(start)
        self._started, self._closed = threading.Event(), threading.Event()
        self._errors: list[BaseException] = []
        self._thread: threading.Thread | None = None

    def start(self, configs: Sequence[WorkerConfig], job: Job | bytes) -> None:
        self._thread = threading.Thread(target=self._run, args=(configs, job), name="penstock-launch", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """End every remaining process: with SIGTERM first, then with SIGKILL, which also ends stopped ones."""
        self._closed.set()
        if self._thread:
            self._started.wait()
        for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _KILL_SECONDS)):
            for member in self.members:
                member.signal(number)
            if self._wait(seconds):
                break
        self._close()

    def release(self, seconds: float) -> None:
        """Let the ranks exit, once all have delivered their results; ranks that take too long are ended."""
        for member in self.members:
            with suppress(OSError):
                member.pipe.send_bytes(b"done")
        if self._wait(seconds):
            self._close()
        else:
            self.stop()

    def _wait(self, seconds: float) -> bool:
        """Whether all processes have ended within this time."""
        end = time.monotonic() + seconds
        while any(member.process.exitcode is None for member in self.members):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def _run(self, configs: Sequence[WorkerConfig], job: Job | bytes) -> None:
        try:
            for config in configs:
                if not self._closed.is_set():
                    self.members.append(self._start_one(config, job))
        except BaseException as error:
            self._errors.append(error)
        self._started.set()
        self._closed.wait()

    def _start_one(self, config: WorkerConfig, job: Job | bytes) -> _Worker:
        here, there = self._context.Pipe()
        process = self._context.Process(target=run_worker, args=(config, there, job), name=f"rank {config.rank}")
        # No garbage collection between the fork and `gc.freeze` in the child: it must not finalise inherited objects.
        with warnings.catch_warnings(), _FORKING:
            # Python 3.12 warns of forks with threads running; the ranks use nothing that another thread could hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            was_enabled = gc.isenabled()
            gc.disable()
            try:
                process.start()
            finally:
                if was_enabled:
                    gc.enable()
        # Only the child holds the other end now, so that its death closes the pipe.
        there.close()
        return _Worker(config.rank, process, here)

    def _close(self) -> None:
        self._closed.set()
        # End the children that outlive their ranks. SIGTERM first: multiprocessing's resource tracker then frees shared
        # memory.
        ended = [member.process.pid for member in self.members if member.process.exitcode is not None]
        groups = [pid for pid in ended if _signal_group(pid, signal.SIGTERM)]
        end = time.monotonic() + _TERM_SECONDS
        while (groups := [pid for pid in groups if _signal_group(pid, 0)]) and time.monotonic() < end:
            time.sleep(0.01)
        for pid in groups:
            _signal_group(pid, signal.SIGKILL)
        for member in self.members:
            member.pipe.close()
            if member.process.exitcode is not None:
                member.process.close()
        self.members.clear()
        if self._thread:
            self._thread.join()


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group; False if no process is left in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


class _Collector:
    """Waits for the results of all ranks, the first failure, or the timeout."""

    def __init__(self, workers: list[_Worker], statuses: Path, timeout: float | None) -> None:
        self._workers, self._statuses, self._timeout = workers, statuses, timeout
        self._packed: dict[int, bytes] = {}
        """the results so far by rank, not yet unpacked"""
        self._reports: list[ErrorReport] = []
        """the failures so far"""
        self._began = self._polled = time.monotonic()

    def results(self) -> list[Any]:
        """The results by rank; raises RunError if a rank failed or time is up."""
        pending = list(self._workers)
        while pending and not self._reports:
            self._poll(pending, _POLL_SECONDS)
            pending = self._pending()
            if self._timeout and time.monotonic() - self._began > self._timeout and not self._reports and pending:
                raise timeout_error(StatusFile.read(self._statuses), time.monotonic(), self._timeout)
        if self._reports:
            raise self._failure()
        results = []
        for rank, packed in sorted(self._packed.items()):
            try:
                results.append(serialization.unpack(packed))
            except Exception as error:
                reason, hint = one_line(error), "return plain values, tensors or state dicts"
                problem = "the result of a rank cannot be read by the launcher"
                raise RunError(problem, rank=rank, reason=reason, hint=hint) from error
        return results

    def _failure(self) -> RunError:
        """The error of the launch: waits a little for reports of other ranks, one of which may be the cause."""
        # The statuses at the time of the first report, before the other ranks are affected by it.
        statuses, now = StatusFile.read(self._statuses), time.monotonic()
        while pending := self._pending():
            # While ranks report only lost contacts, the failure that caused them has not been reported yet.
            limit = _CAUSE_SECONDS if all(report.follows for report in self._reports) else _SETTLE_SECONDS
            if time.monotonic() - now >= limit:
                break
            self._poll(pending, _POLL_SECONDS / 4)
        # A rank that cannot send its report has still written it to its status file.
        silent = {worker.rank for worker in pending}
        for status in StatusFile.read(self._statuses):
            if status.rank in silent and status.failure:
                self._reports.append(ErrorReport.from_text(status.rank, status.failure))
        return launch_error(self._reports, statuses, now)

    def _pending(self) -> list[_Worker]:
        """The ranks that have neither delivered a result nor failed."""
        done = {*self._packed, *(report.rank for report in self._reports)}
        return [worker for worker in self._workers if worker.rank not in done]

    def _poll(self, pending: list[_Worker], seconds: float) -> None:
        """Wait until a rank sends a message or ends, for at most this time, and note results and failures."""
        pipes = [worker.pipe for worker in pending if not worker.is_closed]
        connection.wait([*pipes, *(worker.process.sentinel for worker in pending)], seconds)
        for worker in pending:
            code = worker.process.exitcode  # read first: a message sent before the exit is still in the pipe
            if message := worker.receive():
                kind, content = message
                if kind == FAILURE:
                    self._reports.append(ErrorReport.from_text(worker.rank, content.decode()))
                else:
                    self._packed[worker.rank] = content
            elif code is not None:
                statuses = StatusFile.read(self._statuses)
                failure = next((status.failure for status in statuses if status.rank == worker.rank), "")
                # Neighbours may report the lost contact before the exit is seen here: date it to when the rank was last
                # alive.
                report = exit_report(worker.rank, code, self._polled)
                self._reports.append(ErrorReport.from_text(worker.rank, failure) if failure else report)
        self._polled = time.monotonic()


def _check_arguments(fn: object, ranks: object, start: object, threads: object, timeout: Any, path: object) -> None:
    if not callable(fn):
        raise RunError("fn must be a function", got=type(fn).__name__, hint="launch(train, 4, model, data)")
    for name, number in (("ranks", ranks), ("threads", threads)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RunError(f"{name} must be a positive integer", got=repr(number), hint="launch(train, 4, threads=1)")
    if not isinstance(start, str) or start not in START_METHODS:
        raise RunError("start must be the name of a start method", got=repr(start), hint=choices_text(START_METHODS))
    if timeout is not None and not (is_finite(timeout) and timeout > 0):
        raise RunError("timeout must be a positive number of seconds", got=repr(timeout), hint="60.0, or None")
    if path is not None and not isinstance(path, str | Path):
        raise RunError("status_dir must be a path", got=repr(path), hint='"status", or None')
    # The ranks would inherit the process group and could not join another one.
    if dist.is_available() and dist.is_initialized():
        raise RunError(
            "torch.distributed is already initialised in this process",
            rank=dist.get_rank(),
            ranks=dist.get_world_size(),
            hint="call the function itself (this process is a rank), or dist.destroy_process_group() first",
        )
