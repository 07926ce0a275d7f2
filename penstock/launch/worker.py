"""The process of one launched rank: it joins torch.distributed, runs the function and sends back the result."""

import contextlib
import faulthandler
import gc
import io
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.launch import serialization
from penstock.launch.agent import flush_output
from penstock.launch.process_state import die_with_parent, kill_children_at_exit
from penstock.launch.reports import ErrorReport, one_line
from penstock.launch.scratch import GROUP_PREFIX
from penstock.launch.status_file import MAX_FAILURE_BYTES, STATUS_DIR_VARIABLE, StatusFile

Job = tuple[Callable[..., Any], tuple[Any, ...]]
RESULT, FAILURE = b"result", b"failure"
_MAX_REPORT_BYTES = 1 << 16  # of a traceback with a long message, the middle is left out
_MAX_SOCKET_DIRECTORY = 75  # the name of a socket inside is 32 bytes longer, and may have 107
_BEFORE_EXIT: list[Callable[[], None]] = []


@dataclass(frozen=True)
class WorkerConfig:
    """The configuration of one launched rank."""

    rank: int
    ranks: int
    threads: int
    store: str
    status_dir: str
    parent: int


def run_before_exit(wait: Callable[[], None]) -> None:
    """Call `wait` once after the function of a launched rank has returned; an exception in it fails the rank.

    For work that continues in threads, such as an asynchronous save.
    """
    if wait not in _BEFORE_EXIT:
        _BEFORE_EXIT.append(wait)


def run_worker(config: WorkerConfig, connection: Connection, job: Job | bytes) -> None:
    """Run the job and send its result or its error, then wait until the launcher has the results of all ranks."""
    _set_up_process(config)
    status = None
    try:
        status = StatusFile.create(config.status_dir, config.rank, config.ranks)
        # A file instead of a TCP store: that would listen on every interface, not only on loopback.
        store = dist.FileStore(config.store, config.ranks)
        dist.init_process_group("gloo", store=store, rank=config.rank, world_size=config.ranks)
        result = _call(job)
        while _BEFORE_EXIT:
            _BEFORE_EXIT.pop()()
        try:
            packed = serialization.pack(result)
        except Exception as error:
            raise RunError(
                "the result of a rank cannot be sent to the launcher",
                type=type(result).__name__,
                reason=one_line(error),
                hint="return plain values, tensors or state dicts",
            ) from error
        status.ended()
    except BaseException as error:
        # The two outermost frames are this function and _call: the user's traceback begins below them.
        report = ErrorReport.of(error, config.rank, skip=2)
        if status is not None:
            status.failed(report.to_json(MAX_FAILURE_BYTES))
        flush_output()
        _send(connection, FAILURE, report.to_json(_MAX_REPORT_BYTES).encode())
    else:
        flush_output()
        _send(connection, RESULT, packed)
    # A rank that left now would close connections that other ranks may still use.
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_up_process(config: WorkerConfig) -> None:
    # Objects inherited by a fork are never collected: their finalisers may need threads that only the parent has.
    gc.freeze()
    gc.enable()
    # A process group of its own, so that the launcher can end a rank together with its children, such as loader
    # workers.
    os.setpgid(0, 0)
    scratch = Path(config.store).parent
    # If the launcher is killed, the cleanup process of its directory ends the groups that are named there.
    (scratch / f"{GROUP_PREFIX}{os.getpid()}").touch()
    die_with_parent(config.parent)
    kill_children_at_exit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles ctrl-c
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=2)  # the Python stack of a crash goes to stderr
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that no output is lost when the rank is killed
    # multiprocessing makes its directory of sockets in the launcher's directory, which is removed even after a kill.
    if len(os.fspath(scratch)) <= _MAX_SOCKET_DIRECTORY:
        before, tempfile.tempdir = tempfile.tempdir, os.fspath(scratch)
        try:
            get_temp_dir()  # makes the directory, which is kept for this process and its children
        finally:
            tempfile.tempdir = before
    torch.set_num_threads(config.threads)
    interfaces = [name for _, name in socket.if_nameindex()]
    os.environ.update(
        RANK=str(config.rank),
        LOCAL_RANK=str(config.rank),
        WORLD_SIZE=str(config.ranks),
        LOCAL_WORLD_SIZE=str(config.ranks),
        GLOO_SOCKET_IFNAME=next((name for name in ("lo", "lo0") if name in interfaces), "lo"),
    )
    os.environ[STATUS_DIR_VARIABLE] = config.status_dir


def _call(job: Job | bytes) -> Any:
    """Run the function of the rank. Processes that it forks must not return from here as if they were the rank."""
    fn, args = serialization.unpack(job) if isinstance(job, bytes) else job
    own = os.getpid()
    try:
        result = fn(*args)
    except BaseException as error:
        if os.getpid() != own:
            _end_child(error)
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return None
        raise
    if os.getpid() != own:
        _end_child()
    return result


def _end_child(error: BaseException | None = None) -> NoReturn:
    """End a process that user code forked, and that returned from the function of its rank or raised in it."""
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    flush_output()
    code = getattr(error, "code", 1) if error is not None else 0
    os._exit(code if isinstance(code, int) else int(code is not None))


def _send(connection: Connection, kind: bytes, content: bytes) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone, and kills this process with it
        connection.send_bytes(kind)
        connection.send_bytes(content)
