"""Ends a rank when the process that supervises it is gone: the agent of torchrun, or a parent that a variable names.

Only torchrun's ranks are watched by default. A process whose shell has exited, as with nohup, setsid or a closed
terminal, has lost its parent too, and must keep running. Ranks of `penstock.launch` are killed by the system with their
launcher (`die_with_parent`).
"""

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from penstock.errors import RunError
from penstock.launch.process_state import GONE, parent_of, process_state, start_ticks

PARENT_VARIABLE = "PENSTOCK_PARENT"
"""environment variable: 1 watches the parent process, such as a shell script; 0 watches nothing"""
EXIT_CODE = 5
"""that of a command whose run failed (`penstock/cli/output.py`)"""
_RUN_ID = "TORCHELASTIC_RUN_ID"
_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 5.0
_FLUSH_SECONDS = 0.2
_WATCHED = threading.Lock()


def exit_with_agent() -> None:
    """From now on, end this process (exit code 5) when its supervisor is gone; later calls have no effect.

    Raises:
        RunError: if the agent of torchrun and its store are gone already
    """
    setting, supervisor = os.environ.get(PARENT_VARIABLE, ""), None
    if setting == "1":
        supervisor = os.getppid()
    elif setting != "0" and _RUN_ID in os.environ:
        supervisor = _find_agent()
        if supervisor is None and not _has_store():
            raise RunError("the agent of torchrun that started this rank is gone", hint="start torchrun again")
    # Process 1 cannot die before this process does.
    if supervisor is None or supervisor == 1 or not _WATCHED.acquire(blocking=False):
        return
    ticks = start_ticks(supervisor)
    threading.Thread(target=_watch, args=(supervisor, ticks), name="penstock-agent", daemon=True).start()


def end_process(summary: str) -> None:
    """End this process from any thread with exit code 5, after a line on stderr."""
    # The main thread may hold the lock of stdout in the middle of a print, so flushing gets its own thread.
    flushing = threading.Thread(target=flush_output, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECONDS)
    try:
        os.write(2, f"penstock: {summary}\n".encode())
    finally:  # stderr may be a pipe without a reader
        os._exit(EXIT_CODE)


def flush_output() -> None:
    """Flush stdout and stderr as far as they exist: both are None in a process that was started without them."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _watch(pid: int, ticks: int) -> None:
    while process_state(pid, ticks) != GONE:
        time.sleep(_POLL_SECONDS)
    rank = os.environ.get("RANK", "?")
    end_process(f"rank {rank} stopped because the process that started it (pid {pid}) is gone")


def _find_agent() -> int | None:
    """The agent of torchrun: the nearest ancestor that does not have the run id, which the agent gives its ranks.

    There may be wrappers such as a shell script or numactl in between. None if the agent is gone: then the ancestor is
    process 1 or another one that adopts orphans, which has not loaded torch.
    """
    if sys.platform != "linux":
        return os.getppid()
    mark, pid = f"{_RUN_ID}={os.environ[_RUN_ID]}".encode(), os.getppid()
    try:
        while mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            pid = parent_of(pid)
        return pid if b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes() else None
    except OSError:  # it is gone, or belongs to another user
        return None


def _has_store() -> bool:
    """Whether the store that connects the ranks can be reached; it may be that of an agent on another host."""
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except (OSError, KeyError, ValueError):
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # then rank 0 will host it
    return True
