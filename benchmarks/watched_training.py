"""A training in a process of its own, with its steps, ranks and restarts."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from benchmarks.short_training import COMMAND
from penstock.launch import StatusFile

_LOOK_SECONDS = 0.005
_RESTARTS = 100_000


class Step(NamedTuple):
    """A reported step."""

    step: int
    is_first: bool
    """whether it is the first step after a start or restart"""


class Resumed(NamedTuple):
    """How a training resumed after a fault."""

    reached: int
    """number of steps before the fault"""
    first: int
    """the first step after it, counted from 0"""


class WatchedTraining:
    """`penstock train` in a process; if the command itself ends, it is started again, as a user would do."""

    def __init__(self, directory: Path, every: int) -> None:
        self.directory = directory
        self.scratch = directory / "scratch"
        """directory for its temporary files"""
        self.scratch.mkdir()
        self._every = every
        self._steps: list[Step] = []
        self._marked = 0
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
        lasting = ("--checkpoint", "saved", "--every", str(self._every), "--resume", "auto", "--restarts")
        command = [sys.executable, "-m", "penstock", *COMMAND, *lasting, str(_RESTARTS), "--out", "out", "--json"]
        places = {"PENSTOCK_SCRATCH": os.fspath(self.scratch), "TMPDIR": os.fspath(self.scratch)}
        while not self._is_over:
            with (self.directory / "errors.txt").open("a") as errors:
                self._process = subprocess.Popen(
                    command,
                    cwd=self.directory,
                    env=os.environ | places,
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
        """Number of the last step taken."""
        return self._steps[-1].step + 1 if self._steps else 0

    @property
    def num_starts(self) -> int:
        """Number of starts of the ranks."""
        return sum(step.is_first for step in self._steps)

    @property
    def losses(self) -> list[float]:
        """The losses of all steps."""
        path = self.directory / "out" / "steps.jsonl"
        return [json.loads(line)["loss"] for line in path.read_text(encoding="utf-8").splitlines()]

    def wait_for_steps(self, count: int, seconds: float) -> None:
        """Wait until a number of steps is taken."""
        self._wait(lambda: self.num_steps >= count, seconds)

    @property
    def pid(self) -> int:
        """The process of the command."""
        assert self._process is not None
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The processes of the running ranks."""
        return [status.pid for status in StatusFile.read(self.directory / "out" / "status")]

    def signal_rank(self, rank: int, number: int) -> None:
        """Send a signal to a running rank."""
        self._marked = len(self._steps)
        os.kill(self.pids[rank], number)

    def signal_launcher(self, number: int) -> None:
        """Send a signal to the command itself."""
        assert self._process is not None
        self._marked = len(self._steps)
        self._process.send_signal(number)

    def resumed(self, seconds: float) -> Resumed:
        """Wait until it has resumed after the last signal."""

        def first() -> int | None:
            later = range(self._marked, len(self._steps))
            return next((place for place in later if self._steps[place].is_first), None)

        self._wait(lambda: first() is not None, seconds)
        place = first()
        assert place is not None
        return Resumed(self._steps[place - 1].step + 1 if place else 0, self._steps[place].step)

    def stop(self) -> None:
        """Ask it to stop, and wait until it has."""
        self._is_over = True
        self.signal_launcher(signal.SIGTERM)
        self._watcher.join()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                said = (self.directory / "errors.txt").read_text(encoding="utf-8")[-2000:]
                raise TimeoutError(f"the training does not continue; its last output was:\n{said}")
            time.sleep(_LOOK_SECONDS)
