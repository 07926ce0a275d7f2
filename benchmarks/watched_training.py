"""`penstock train` in a separate process: its steps, ranks and restarts, its sockets, and what it leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from benchmarks.short_training import COMMAND
from penstock.launch import StatusFile

_POLL_SECONDS = 0.005
_RESTARTS = 100_000


class Step(NamedTuple):
    """A step that the run reported."""

    step: int
    is_first: bool
    """whether it is the first step after a start or restart"""


class Resumed(NamedTuple):
    """The steps before and after a fault."""

    reached: int
    """number of steps before the fault"""
    first: int
    """the first step after it, counted from 0"""


class WatchedTraining:
    """Runs `penstock train` in a separate process, and starts it again if the command itself ends."""

    def __init__(self, directory: Path, every: int) -> None:
        self.directory = directory
        self.scratch = directory / "scratch"
        """directory for the temporary files of the run"""
        self.scratch.mkdir()
        self._every = every
        self._steps: list[Step] = []
        self._steps_at_signal = 0
        self._is_over = False
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "WatchedTraining":
        self._watcher = threading.Thread(target=self._run, daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._process is not None:
            self._process.kill()
        self._watcher.join()

    def _run(self) -> None:
        saving = ("--checkpoint", "saved", "--every", str(self._every), "--resume", "auto", "--restarts")
        command = [sys.executable, "-m", "penstock", *COMMAND, *saving, str(_RESTARTS), "--out", "out", "--json"]
        directories = {"PENSTOCK_SCRATCH": os.fspath(self.scratch), "TMPDIR": os.fspath(self.scratch)}
        while not self._is_over:
            with (self.directory / "errors.txt").open("a") as errors:
                self._process = subprocess.Popen(
                    command,
                    cwd=self.directory,
                    env=os.environ | directories,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                assert self._process.stdout is not None
                for line in self._process.stdout:
                    self._on_line(json.loads(line))
                self._process.wait()

    def _on_line(self, line: dict[str, object]) -> None:
        step = int(str(line["step"]))
        resumed = any("resumed from" in str(note) for note in line["notes"])  # type: ignore[attr-defined]
        self._steps.append(Step(step, resumed or step == 0))

    @property
    def num_steps(self) -> int:
        """The number of steps, without repeated ones."""
        return self._steps[-1].step + 1 if self._steps else 0

    @property
    def num_starts(self) -> int:
        """The number of times that the ranks were started."""
        return sum(step.is_first for step in self._steps)

    @property
    def losses(self) -> list[float]:
        """The losses of all steps."""
        path = self.directory / "out" / "steps.jsonl"
        return [json.loads(line)["loss"] for line in path.read_text(encoding="utf-8").splitlines()]

    def wait_for_steps(self, count: int, seconds: float) -> None:
        """Waits until the run has taken a number of steps."""
        self._wait(lambda: self.num_steps >= count, seconds)

    @property
    def pid(self) -> int:
        """The process id of the command."""
        assert self._process is not None
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks."""
        return [status.pid for status in StatusFile.read(self.directory / "out" / "status")]

    def signal_rank(self, rank: int, number: int) -> None:
        """Sends a signal to a rank."""
        self._steps_at_signal = len(self._steps)
        os.kill(self.pids[rank], number)

    def signal_launcher(self, number: int) -> None:
        """Sends a signal to the command itself."""
        assert self._process is not None
        self._steps_at_signal = len(self._steps)
        self._process.send_signal(number)

    def resumed(self, seconds: float) -> Resumed:
        """Waits until the run has resumed after the last signal."""

        def first() -> int | None:
            later = range(self._steps_at_signal, len(self._steps))
            return next((place for place in later if self._steps[place].is_first), None)

        self._wait(lambda: first() is not None, seconds)
        place = first()
        assert place is not None
        return Resumed(self._steps[place - 1].step + 1 if place else 0, self._steps[place].step)

    def stop(self) -> None:
        """Sends SIGTERM and waits until the run has ended."""
        self._is_over = True
        self.signal_launcher(signal.SIGTERM)
        self._watcher.join()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                errors = (self.directory / "errors.txt").read_text(encoding="utf-8")[-2000:]
                raise TimeoutError(f"the training does not continue; its last output was:\n{errors}")
            time.sleep(_POLL_SECONDS)


def left_over(scratch: Path, *directories: Path) -> list[str]:
    """Lists temporary files in a scratch directory, and processes whose working directory is one of `directories`."""
    resolved = {path.resolve() for path in directories}
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() in resolved:
                processes.append(f"process {process.name}")
        except OSError:  # the process has ended or belongs to another user
            continue
    # Unlike `Path.rglob`, `os.walk` skips directories that are removed meanwhile.
    inside = ((directory, name) for directory, *names in os.walk(scratch) for name in chain(*names))
    return [*sorted(os.path.join(*each) for each in inside if each[1].startswith("penstock-")), *processes]


def listeners(pids: Iterable[int]) -> list[str] | None:
    """The addresses on which processes listen, according to `ss`; None without `ss`."""
    if shutil.which("ss") is None:
        return None
    listed = subprocess.run(["ss", "-Hltnup"], capture_output=True, text=True, check=True).stdout.splitlines()
    own = [f"pid={pid}," for pid in pids]
    return [line.split()[4] for line in listed if any(pid in line for pid in own)]


def is_local(address: str) -> bool:
    """Whether an address is a loopback address."""
    return address.startswith(("127.", "[::1]"))
