"""torchrun_kills: the torchrun agent is killed at random times; its ranks must end, and the run must resume."""

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import is_as_clean
from benchmarks.short_training import COMMAND, ShortTraining
from benchmarks.table import Line, Table
from benchmarks.watched_training import left_over

RANKS, STEPS, LIMIT_SECONDS = 2, 150, 5.0
_MAX_STEPS = 6
_END_TIMEOUT_SECONDS, _START_TIMEOUT_SECONDS = 20.0, 300.0
_POLL_SECONDS = 0.02
LOADER = """\
import time
from torch.utils.data import DataLoader

import model

def batches():
    source = model.batches()
    batches = [next(source) for _ in range(200)]
    for batch in DataLoader(batches, batch_size=None, num_workers=1):
        time.sleep(0.05)
        yield batch
"""


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (killed_agents(),)


@dataclass(frozen=True)
class Killed:
    """The state after the agent was killed."""

    seconds: float
    """until every rank and every data-loader worker has ended"""
    is_free: bool
    """whether the lock of the checkpoint directory is released"""
    left: list[str]
    """processes, and temporary files of penstock"""


class Torchrun:
    """`penstock train` under torchrun, with data-loader workers."""

    def __init__(self, training: ShortTraining, scratch: Path, *options: object) -> None:
        self._directory, self._scratch = training.directory, scratch
        (self._directory / "loader.py").write_text(LOADER, encoding="utf-8")
        agent = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "-m", "penstock")
        command = ["loader.py:batches" if word == "model.py:batches" else word for word in COMMAND]
        saving = ("--checkpoint", "saved", "--every", "3", "--resume", "auto", "--out", "out")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *agent, *command, *saving, *map(str, options)],
            cwd=self._directory,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PENSTOCK_SCRATCH": os.fspath(scratch)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @property
    def num_steps(self) -> int:
        """The number of steps in the log."""
        log = self._directory / "out" / "steps.jsonl"
        return len(log.read_text(encoding="utf-8").splitlines()) if log.exists() else 0

    @property
    def _num_processes(self) -> int:
        """The number of processes: the agent, ranks, and data-loader workers."""
        return sum(name.startswith("process") for name in left_over(self._scratch, self._directory))

    def wait_for_ranks(self) -> None:
        """Waits until the ranks have started."""
        self._wait_until(lambda: self._num_processes > RANKS)

    def wait_for_steps(self, number: int) -> None:
        """Waits until the log has a number of steps."""
        self._wait_until(lambda: self.num_steps >= number)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_TIMEOUT_SECONDS
        while not condition():
            assert self.process.poll() is None, f"torchrun ended with {self.process.returncode}"
            assert time.monotonic() < end, "training does not start"
            time.sleep(_POLL_SECONDS)

    def kill(self) -> Killed:
        """Kills the agent only, and waits until its ranks have ended."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        start = time.monotonic()
        while time.monotonic() - start < _END_TIMEOUT_SECONDS:
            left, is_free = left_over(self._scratch, self._directory), _is_free(self._directory / "saved")
            if is_free and not left:
                break
            time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - start
        for name in left:  # they would disturb the next round
            if name.startswith("process"):
                os.kill(int(name.split()[1]), signal.SIGKILL)
        return Killed(seconds, is_free, left)


def _is_free(directory: Path) -> bool:
    if not directory.exists():
        return True
    number = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(number)
    return True


def killed_agents(rounds: int = 20) -> Table:
    """Counts the rounds in which all processes end in time; each round resumes the run of the one before."""

    def lines() -> Iterator[Line]:
        rng = random.Random(0)
        with ShortTraining.made(RANKS) as training:
            clean = training.run(steps=STEPS)
            for name in ("saved", "out"):
                shutil.rmtree(training.directory / name)
            scratch = training.directory / "scratch"
            scratch.mkdir()
            found = []
            for _ in range(rounds):
                torchrun = Torchrun(training, scratch)
                steps = torchrun.num_steps + rng.randrange(_MAX_STEPS)
                # A third of the kills come while the ranks start.
                torchrun.wait_for_ranks()
                if rng.randrange(3):
                    torchrun.wait_for_steps(steps + 1)
                    time.sleep(rng.uniform(0.0, 0.3))
                else:
                    time.sleep(rng.uniform(0.0, 2.0))
                found.append(torchrun.kill())
            passed = sum(kill.seconds <= LIMIT_SECONDS and kill.is_free and not kill.left for kill in found)
            yield Line(("rounds passed", str(rounds), str(passed)), passed, rounds)
            latest = max(kill.seconds for kill in found)
            yield Line(("maximum seconds", str(rounds), f"{latest:.2f}"), latest, LIMIT_SECONDS, at_least=False)
            # With the same loader: it draws all batches at once, which changes the random state in checkpoints.
            options = ("--data", "loader.py:batches", "--resume", "auto", "--plan", "plan.json")
            ended = training.run((), *options, steps=STEPS, fresh=False)
            yield Line(("same losses", "1", str(int(is_as_clean(ended, clean)))), is_as_clean(ended, clean), 1)

    return Table("torchrun agent killed", ("", "rounds", "value"), lines())
