"""The state of processes of this host (running, stopped or gone), and child processes that die with their parent."""

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
# Positions in /proc/PID/stat, counted after the process name, which may itself contain spaces.
_STATE, _PARENT, _STARTED = 0, 1, 19
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.2


@cache
def host_id() -> int:
    """A number that identifies where a pid is valid: the machine, its last boot and the container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8"))
        parts.append(os.readlink("/proc/self/ns/pid"))
    return zlib.crc32("\n".join(parts).encode())


def start_ticks(pid: int) -> int:
    """When the process was started, in clock ticks since boot: distinguishes it from a later one with the same pid."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields else 0


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if it has none, or the process is gone."""
    fields = _stat(pid)
    return int(fields[_PARENT]) if fields else 0


def process_state(pid: int, ticks: int = 0) -> str:
    """`running`, `stopped` (by a signal or a debugger) or `gone`; also `gone` if the pid was reused since `ticks`."""
    if not _LINUX:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return GONE
        except PermissionError:
            pass  # it exists and belongs to another user
        return RUNNING
    fields = _stat(pid)
    if fields is None:
        return RUNNING  # unknown: this process may have no file descriptor left
    if not fields or fields[_STATE] in "ZX" or (ticks and int(fields[_STARTED]) != ticks):
        return GONE
    return STOPPED if fields[_STATE] in "Tt" else RUNNING


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent, or the parent's thread that started it, ends."""
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:

        def poll_parent() -> None:
            while os.getppid() == parent:
                time.sleep(_POLL_SECONDS)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=poll_parent, name="penstock-parent", daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the request was made
        os._exit(1)


def kill_children_at_exit() -> None:
    """From now on, have children that the main thread forks killed when this process ends, however it ends.

    For data-loader workers and other forks, not for programs started with `subprocess`. Only on Linux.
    """
    if not _LINUX:
        return
    owner, prctl = os.getpid(), ctypes.CDLL(None, use_errno=True).prctl
    dies = False

    def before() -> None:
        # The signal comes when the thread that forked ends, so children of other threads would be killed too early.
        # Children of children are left alone: a daemon forks twice to outlive its parent.
        nonlocal dies
        dies = os.getpid() == owner and threading.current_thread() is threading.main_thread()

    def after_in_child() -> None:
        if dies:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != owner:  # it ended before the request was made
                os._exit(1)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat; empty if the process is gone, None if they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:
        return None
    return text.rpartition(")")[2].split()
