"""Injects a fault into a training every few seconds and compares it with an undisturbed one.

`python -m benchmarks.soak [SECONDS [EVERY [SEED]]]` prints the faults, restarts, lost steps and differences; it fails
if a loss differs, a requested stop loses steps, or anything is left behind. Then the files of both trainings, their
output and the list of faults are kept in `soak-log`.
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
from benchmarks.process_checks import left_over
from benchmarks.short_training import ShortTraining
from benchmarks.watched_training import WatchedTraining
from penstock.checkpoint import TEMPORARY, CheckpointDir

RANKS, EVERY_STEPS = 2, 20
_LOOK_SECONDS = 0.01
_PATIENCE_SECONDS = 300.0
LOG = Path("soak-log")


@dataclass
class Tally:
    """Counts so far."""

    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    lost: int = 0
    """steps that had to be repeated"""
    most_lost: int = 0
    lost_by_request: int = 0
    """those lost although a stop was requested, so that the run could save"""
    longest_seconds: float = 0.0
    """from a fault to the next step"""


class FaultSequence:
    """Injects faults into a training one after another and waits until it resumes."""

    def __init__(self, training: WatchedTraining, seed: int) -> None:
        self._training, self._rng = training, random.Random(seed)
        self.tally = Tally()
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
        """Inject one fault and wait for the next step; kinds alternate."""
        name = list(self._kinds)[number % len(self._kinds)]
        began = time.monotonic()
        self.log.append(f"{time.strftime('%H:%M:%S')} {name}")
        self._kinds[name]()
        resumed = self._training.resumed(_PATIENCE_SECONDS)
        lost = resumed.reached - resumed.first
        tally = self.tally
        tally.faults[name] += 1
        tally.lost += lost
        tally.most_lost = max(tally.most_lost, lost)
        tally.lost_by_request += lost if "asked" in name else 0
        tally.longest_seconds = max(tally.longest_seconds, time.monotonic() - began)
        outcome = f"{time.monotonic() - began:.1f} s, {lost} steps repeated"
        self.log[-1] += f": {outcome}"
        print(f"  {name}: {outcome}", flush=True)

    def _kill(self) -> None:
        self._training.signal_rank(self._rank, signal.SIGKILL)

    def _kill_in_a_save(self) -> None:
        """Kill a rank a random moment after a save has begun."""
        saved = self._training.directory / "saved"
        end = time.monotonic() + _PATIENCE_SECONDS
        while not any(saved.glob(f"{TEMPORARY}*")) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS / 10)
        time.sleep(self._rng.uniform(0.0, 0.02))
        self._kill()

    def _damage(self) -> None:
        saved = self._training.directory / "saved"
        self._kill()
        # The launcher takes a moment to end the other ranks, so the damage is done before anything is read.
        flip(CheckpointDir(saved).checkpoints[0], self._rng)


def soak(seconds: float = 600.0, every: float = 10.0, seed: int = 0) -> bool:
    """Whether a training survives with the losses of an undisturbed one; prints a summary."""
    with _pair() as (training, reference):
        faults, is_good = FaultSequence(training, seed), False
        try:
            training.wait_for_steps(1, _PATIENCE_SECONDS)
            began, number = time.monotonic(), 0
            while time.monotonic() - began + every < seconds:
                time.sleep(max(0.0, began + (number + 1) * every - time.monotonic()))
                faults.inject(number)
                number += 1
            training.stop()
            losses = training.losses
            reference.wait_for_steps(len(losses), _PATIENCE_SECONDS)
            reference.stop()
            faults.tally.restarts = training.num_starts - 1
            scratch = [left_over(one.scratch, one.directory) for one in (training, reference)]
            left = [name for names in scratch for name in names]
            is_good = _summarize(faults.tally, losses, reference.losses[: len(losses)], left)
        finally:
            if not is_good:
                _keep_log(faults.log, training.directory, reference.directory)
        return is_good


def _keep_log(faults: list[str], disturbed: Path, undisturbed: Path) -> None:
    """Copy everything that shows what went wrong to LOG, in place of an earlier log."""
    shutil.rmtree(LOG, ignore_errors=True)
    for name, directory in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        # The training may still run: its files come and go.
        with contextlib.suppress(shutil.Error):
            shutil.copytree(directory, LOG / name, ignore=shutil.ignore_patterns("scratch"))
    (LOG / "faults.txt").write_text("\n".join(faults) + "\n", encoding="utf-8")
    print(f"the files of both trainings are in {LOG.resolve()}")


@contextmanager
def _pair() -> "Iterator[tuple[WatchedTraining, WatchedTraining]]":
    with ShortTraining.made(RANKS) as one, ShortTraining.made(RANKS) as other:
        # With the same plan the losses are bit-identical.
        plan = (one.directory / "plan.json").read_bytes()
        (other.directory / "plan.json").write_bytes(plan)
        disturbed, undisturbed = WatchedTraining(one.directory, EVERY_STEPS), WatchedTraining(other.directory, 1000)
        with disturbed as training, undisturbed as reference:
            yield training, reference


def _summarize(tally: Tally, losses: list[float], wanted: list[float], left: list[str]) -> bool:
    differences = sum(ours != theirs for ours, theirs in zip(losses, wanted, strict=False))
    differences += abs(len(losses) - len(wanted))
    for name, count in tally.faults.items():
        print(f"{count:6} x {name}")
    print(f"{sum(tally.faults.values()):6} faults, {tally.restarts} restarts, {len(losses)} steps")
    print(f"{tally.lost:6} steps repeated, at most {tally.most_lost} after one fault (saved every {EVERY_STEPS})")
    print(f"{tally.lost_by_request:6} steps lost although a stop was requested")
    print(f"{differences:6} differences to the undisturbed training")
    print(f"{tally.longest_seconds:6.1f} s at most from a fault to the next step")
    print(f"{len(left):6} processes or files left behind {' '.join(left)}")
    return not (differences or tally.lost_by_request or left) and tally.longest_seconds <= _PATIENCE_SECONDS


if __name__ == "__main__":
    # Asked to stop, the log is kept as after any other end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(0 if soak(*map(float, sys.argv[1:3]), *map(int, sys.argv[3:4])) else 1)
