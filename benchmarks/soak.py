"""soak: injects a fault into a training run every few seconds and compares its losses with those of a run without.

`python -m benchmarks.soak [SECONDS [EVERY [SEED]]]` prints faults, restarts, lost steps and differences. It fails if a
loss differs, if a requested stop loses steps, or if a process or temporary file is left. Then it copies the files and
output of both runs and the list of faults to `soak-log`.
"""

import contextlib
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.damages import flip
from benchmarks.short_training import ShortTraining
from benchmarks.watched_training import WatchedTraining, left_over
from penstock.checkpoint import TEMPORARY, CheckpointDir

RANKS, EVERY_STEPS = 2, 20
_POLL_SECONDS = 0.01
_TIMEOUT_SECONDS = 300.0
LOG = Path("soak-log")


@dataclass
class Counts:
    """Counts of a run so far."""

    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    lost: int = 0
    """repeated steps"""
    most_lost: int = 0
    lost_by_request: int = 0
    """repeated steps after a requested stop, at which the run could have saved"""
    longest_seconds: float = 0.0
    """maximum from a fault to the next step"""


class FaultSequence:
    """Injects faults into a run, one after another, and waits until it resumes after each."""

    def __init__(self, training: WatchedTraining, seed: int) -> None:
        self._training, self._rng = training, random.Random(seed)
        self.counts = Counts()
        self.log: list[str] = []
        """a line for every fault"""
        self._kinds: dict[str, Callable[[], None]] = {
            "a rank killed": self._kill,
            "a rank aborted": lambda: self._training.signal_rank(self._rank, signal.SIGABRT),
            "a rank killed while saving": self._kill_in_a_save,
            "the newest checkpoint damaged, a rank killed": self._damage,
            "the launcher killed": lambda: self._training.signal_launcher(signal.SIGKILL),
            "a rank asked to stop": lambda: self._training.signal_rank(self._rank, signal.SIGTERM),
            "the launcher asked to stop": lambda: self._training.signal_launcher(signal.SIGINT),
        }

    @property
    def _rank(self) -> int:
        return self._rng.randrange(RANKS)

    def inject(self, number: int) -> None:
        """Injects a fault and waits for the next step; `number` selects its kind."""
        name = list(self._kinds)[number % len(self._kinds)]
        start = time.monotonic()
        self.log.append(f"{time.strftime('%H:%M:%S')} {name}")
        self._kinds[name]()
        resumed = self._training.resumed(_TIMEOUT_SECONDS)
        lost = resumed.reached - resumed.first
        counts = self.counts
        counts.faults[name] += 1
        counts.lost += lost
        counts.most_lost = max(counts.most_lost, lost)
        counts.lost_by_request += lost if "asked" in name else 0
        counts.longest_seconds = max(counts.longest_seconds, time.monotonic() - start)
        outcome = f"{time.monotonic() - start:.1f} s, {lost} steps repeated"
        self.log[-1] += f": {outcome}"
        print(f"  {name}: {outcome}", flush=True)

    def _kill(self) -> None:
        self._training.signal_rank(self._rank, signal.SIGKILL)

    def _kill_in_a_save(self) -> None:
        """Kills a rank up to 20 ms after a save has begun."""
        saved = self._training.directory / "saved"
        end = time.monotonic() + _TIMEOUT_SECONDS
        while not any(saved.glob(f"{TEMPORARY}*")) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS / 10)
        time.sleep(self._rng.uniform(0.0, 0.02))
        self._kill()

    def _damage(self) -> None:
        saved = self._training.directory / "saved"
        self._kill()
        # The launcher needs longer to end the other ranks, so the file is damaged before it is read.
        flip(CheckpointDir(saved).checkpoints[0], self._rng)


def soak(seconds: float = 600.0, every: float = 10.0, seed: int = 0) -> bool:
    """Injects faults, prints a summary, and returns whether all losses equal those of a run without faults."""
    with _pair() as (training, reference):
        faults, is_good = FaultSequence(training, seed), False
        try:
            training.wait_for_steps(1, _TIMEOUT_SECONDS)
            start, number = time.monotonic(), 0
            while time.monotonic() - start + every < seconds:
                time.sleep(max(0.0, start + (number + 1) * every - time.monotonic()))
                faults.inject(number)
                number += 1
            training.stop()
            losses = training.losses
            reference.wait_for_steps(len(losses), _TIMEOUT_SECONDS)
            reference.stop()
            faults.counts.restarts = training.num_starts - 1
            scratch = [left_over(one.scratch, one.directory) for one in (training, reference)]
            left = [name for names in scratch for name in names]
            is_good = _summarize(faults.counts, losses, reference.losses[: len(losses)], left)
        finally:
            if not is_good:
                _keep_log(faults.log, training.directory, reference.directory)
        return is_good


def _keep_log(faults: list[str], disturbed: Path, undisturbed: Path) -> None:
    """Copies the files of both runs and the list of faults to LOG, which is emptied first."""
    shutil.rmtree(LOG, ignore_errors=True)
    for name, directory in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        # The run may not have ended, so files can vanish while they are copied.
        with contextlib.suppress(shutil.Error):
            shutil.copytree(directory, LOG / name, ignore=shutil.ignore_patterns("scratch"))
    (LOG / "faults.txt").write_text("\n".join(faults) + "\n", encoding="utf-8")
    print(f"the files of both runs are in {LOG.resolve()}")


@contextmanager
def _pair() -> "Iterator[tuple[WatchedTraining, WatchedTraining]]":
    with ShortTraining.made(RANKS) as one, ShortTraining.made(RANKS) as other:
        # Losses are bit-identical only with the same plan.
        plan = (one.directory / "plan.json").read_bytes()
        (other.directory / "plan.json").write_bytes(plan)
        disturbed, undisturbed = WatchedTraining(one.directory, EVERY_STEPS), WatchedTraining(other.directory, 1000)
        with disturbed as training, undisturbed as reference:
            yield training, reference


def _summarize(counts: Counts, losses: list[float], expected: list[float], left: list[str]) -> bool:
    differences = sum(ours != theirs for ours, theirs in zip(losses, expected, strict=False))
    differences += abs(len(losses) - len(expected))
    for name, count in counts.faults.items():
        print(f"{count:6} x {name}")
    print(f"{sum(counts.faults.values()):6} faults, {counts.restarts} restarts, {len(losses)} steps")
    print(f"{counts.lost:6} steps repeated, at most {counts.most_lost} after one fault (saved every {EVERY_STEPS})")
    print(f"{counts.lost_by_request:6} steps lost although a stop was requested")
    print(f"{differences:6} losses that differ from the run without faults")
    print(f"{counts.longest_seconds:6.1f} s at most from a fault to the next step")
    print(f"{len(left):6} processes or files left behind {' '.join(left)}")
    return not (differences or counts.lost_by_request or left) and counts.longest_seconds <= _TIMEOUT_SECONDS


if __name__ == "__main__":
    # As an exception, so that the log is written on SIGTERM as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(0 if soak(*map(float, sys.argv[1:3]), *map(int, sys.argv[3:4])) else 1)
