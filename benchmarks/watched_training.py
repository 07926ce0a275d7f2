"""A training that runs as a process of its own and is watched: its steps, its ranks, and that it is taken up again."""

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


class Told(NamedTuple):
    """A step that was told."""

    step: int
    is_first: bool
    """whether it is the first one that these ranks have taken"""


class Resumed(NamedTuple):
    """How a training went on after a break."""

    reached: int
    """steps that were taken before"""
    first: int
    """the step with which it went on, counted from 0"""


class WatchedTraining:
    """`penstock train` on processes; if the command itself ends, it is started again, as a user would."""

    def __init__(self, directory: Path, every: int) -> None:
        self.directory = directory
        self.scratch = directory / "scratch"
        """where it keeps what is gone when it ends"""
        self.scratch.mkdir()
        self._every = every
        self._told: list[Told] = []
        self._marked = 0
        self._is_over = False
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "WatchedTraining":
        self._watcher = threading.Thread(target=self._keep_up, daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        if self._process is not None:
            self._process.kill()
        self._watcher.join()

    def _keep_up(self) -> None:
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
                    self._hear(json.loads(line))
                self._process.wait()

    def _hear(self, told: dict[str, object]) -> None:
        step = int(str(told["step"]))
        went_on = any("resumed from" in str(remark) for remark in told["remarks"])  # type: ignore[attr-defined]
        self._told.append(Told(step, went_on or step == 0))

    @property
    def num_steps(self) -> int:
        """How far it has come."""
        return self._told[-1].step + 1 if self._told else 0

    @property
    def num_starts(self) -> int:
        """How often ranks were started."""
        return sum(told.is_first for told in self._told)

    @property
    def losses(self) -> list[float]:
        """Of all steps, as they stand in the diary."""
        path = self.directory / "out" / "steps.jsonl"
        return [json.loads(line)["loss"] for line in path.read_text(encoding="utf-8").splitlines()]

    def wait_for_steps(self, count: int, seconds: float) -> None:
        """Until so many steps are taken."""
        self._wait(lambda: self.num_steps >= count, seconds)

    @property
    def pid(self) -> int:
        """The process of the command."""
        assert self._process is not None
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks that are at work."""
        return [status.pid for status in StatusFile.read(self.directory / "out" / "board")]

    def signal_rank(self, rank: int, number: int) -> None:
        """Send a signal to a rank that is at work."""
        self._marked = len(self._told)
        os.kill(self.pids[rank], number)

    def signal_launcher(self, number: int) -> None:
        """Send a signal to the command itself."""
        assert self._process is not None
        self._marked = len(self._told)
        self._process.send_signal(number)

    def resumed(self, seconds: float) -> Resumed:
        """How it went on after the last signal, once it has."""

        def first() -> int | None:
            later = range(self._marked, len(self._told))
            return next((place for place in later if self._told[place].is_first), None)

        self._wait(lambda: first() is not None, seconds)
        place = first()
        assert place is not None
        return Resumed(self._told[place - 1].step + 1 if place else 0, self._told[place].step)

    def stop(self) -> None:
        """Ask it to stop, and wait until it has."""
        self._is_over = True
        self.signal_launcher(signal.SIGTERM)
        self._watcher.join()

    def _wait(self, is_so: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                said = (self.directory / "errors.txt").read_text(encoding="utf-8")[-2000:]
                raise TimeoutError(f"the training does not go on; it said last:\n{said}")
            time.sleep(_LOOK_SECONDS)
