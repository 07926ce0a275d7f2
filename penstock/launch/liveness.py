"""Whether a process of this host runs, is stopped or is gone, and how a child dies with its parent."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import zlib
from functools import cache
from pathlib import Path

RUNNING, STOPPED, GONE, ELSEWHERE = "running", "stopped", "gone", "elsewhere"
_LINUX = sys.platform == "linux"
_STATE, _STARTED = 0, 19  # the fields of /proc/PID/stat behind the name, which may itself hold spaces
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.2


def started(pid: int) -> int:
    """When the process was started, in ticks since boot; with it, a reused number is not taken for the same process."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields else 0


def state_of(pid: int, ticks: int = 0) -> str:
    """`running`, `stopped` (by a signal or a debugger) or `gone` (also when only its number has come back)."""
    if not _LINUX:
        return RUNNING if _answers(pid) else GONE
    fields = _stat(pid)
    if not fields or fields[_STATE] in "ZX" or (ticks and int(fields[_STARTED]) != ticks):
        return GONE
    return STOPPED if fields[_STATE] in "Tt" else RUNNING


def die_with(parent: int) -> None:
    """From now on this process is killed when the parent, or the thread of it that started this process, ends."""
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_follow, args=(parent,), name="penstock-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


@cache
def host() -> int:
    """A number for the place in which a process number has its meaning: machine, boot and container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8"))
        parts.append(os.readlink("/proc/self/ns/pid"))
    return zlib.crc32("\n".join(parts).encode())


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
