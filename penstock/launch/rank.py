"""What a launched process does: it becomes a rank of torch.distributed, runs the function and delivers its result."""

import contextlib
import faulthandler
import gc
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import RunError
from penstock.launch import liveness, parcels
from penstock.launch.board import LARGEST_FAILURE, VARIABLE, Board
from penstock.launch.failure import Failure
from penstock.launch.leaving import wait_for_all

Job = tuple[Callable[..., Any], tuple[Any, ...]]
RESULT, FAILURE = b"result", b"failure"


@dataclass(frozen=True)
class Seat:
    """The place of one rank."""

    rank: int
    ranks: int
    threads: int
    store: str
    board: str
    parent: int


def serve(seat: Seat, line: Connection, job: "Job | bytes") -> None:
    """Run the job and send its result or its failure, then stay until the launcher has it from every rank."""
    _settle(seat)
    board = None
    try:
        board = Board.create(seat.board, seat.rank, seat.ranks)
        _meet(seat)
        result = _run(job)
        wait_for_all()
        parcel = _packed(result)
        board.ended()
    except BaseException as error:
        failure = Failure.of(error, seat.rank, skip=2)
        if board is not None:
            board.failed(failure.to_json(LARGEST_FAILURE))
        _flush()
        _send(line, FAILURE, failure.to_json().encode())
    else:
        _flush()
        _send(line, RESULT, parcel)
    # The connections of a rank that leaves early would look broken to those that still work.
    with contextlib.suppress(EOFError, OSError):
        line.recv_bytes()
    if dist.is_initialized():
        dist.destroy_process_group()


def _settle(seat: Seat) -> None:
    # What a fork inherits is never collected: to end it properly could take threads that only the parent has.
    gc.freeze()
    gc.enable()
    # A group of its own, so that the launcher ends a rank together with what it has started, such as loader workers.
    os.setpgid(0, 0)
    liveness.die_with(seat.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the launcher's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable(file=2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what was printed is out, also when the rank is killed
    torch.set_num_threads(seat.threads)
    places = {"RANK": seat.rank, "LOCAL_RANK": seat.rank, "WORLD_SIZE": seat.ranks, "LOCAL_WORLD_SIZE": seat.ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ[VARIABLE] = seat.board
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()


def _meet(seat: Seat) -> None:
    store = dist.FileStore(seat.store, seat.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.ranks)


def _run(job: "Job | bytes") -> Any:
    fn, args = parcels.unpack(job) if isinstance(job, bytes) else job
    try:
        return fn(*args)
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return None
        raise


def _packed(result: Any) -> bytes:
    try:
        return parcels.pack(result)
    except Exception as error:
        raise RunError(
            "the result of a rank cannot be sent to the launcher",
            type=type(result).__name__,
            reason=f"{type(error).__name__}: {error}",
            hint="return plain values, tensors or state dicts",
        ) from error


def _send(line: Connection, kind: bytes, content: bytes) -> None:
    with contextlib.suppress(OSError):  # the launcher is gone, and this process with it in a moment
        line.send_bytes(kind)
        line.send_bytes(content)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def board_directory() -> Path | None:
    """The directory of the boards that the launcher made, None outside of it."""
    return Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None
