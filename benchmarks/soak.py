"""soak: a training that something happens to every few seconds, beside its twin that nothing happens to.

`python -m benchmarks.soak [SECONDS [EVERY [SEED]]]` prints the faults, restarts, steps lost and differences; it fails
if a loss differs, steps are lost where none should be, or anything is left behind.
"""

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.damages import flip
from benchmarks.leftovers import left_over
from benchmarks.short_training import ShortTraining
from benchmarks.watched_training import WatchedTraining
from penstock.checkpoint import TEMPORARY, CheckpointDir

RANKS, EVERY_STEPS = 2, 20
_LOOK_SECONDS = 0.01
_PATIENCE_SECONDS = 60.0


@dataclass
class Tally:
    """What happened so far."""

    faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    lost: int = 0
    """steps that had to be taken again"""
    most_lost: int = 0
    lost_for_nothing: int = 0
    """of them, where the run was asked to stop and could have saved"""
    longest_seconds: float = 0.0
    """from a fault to the next step"""


class Storm:
    """Lets something happen to a training, again and again, and sees that it goes on."""

    def __init__(self, training: WatchedTraining, seed: int) -> None:
        self._training, self._rng = training, random.Random(seed)
        self.tally = Tally()
        self._fates: dict[str, Callable[[], None]] = {
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

    def strike(self, number: int) -> None:
        """One fault, and wait until steps are taken again; of all kinds by turns."""
        name = list(self._fates)[number % len(self._fates)]
        began = time.monotonic()
        self._fates[name]()
        resumed = self._training.resumed(_PATIENCE_SECONDS)
        lost = resumed.reached - resumed.first
        tally = self.tally
        tally.faults[name] += 1
        tally.lost += lost
        tally.most_lost = max(tally.most_lost, lost)
        tally.lost_for_nothing += lost if "asked" in name else 0
        tally.longest_seconds = max(tally.longest_seconds, time.monotonic() - began)
        print(f"  {name}: {time.monotonic() - began:.1f} s, {lost} steps again", flush=True)

    def _kill(self) -> None:
        self._training.signal_rank(self._rank, signal.SIGKILL)

    def _kill_in_a_save(self) -> None:
        """As soon as a checkpoint is being written, and a random moment later."""
        saved = self._training.directory / "saved"
        end = time.monotonic() + _PATIENCE_SECONDS
        while not any(saved.glob(f"{TEMPORARY}*")) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS / 10)
        time.sleep(self._rng.uniform(0.0, 0.02))
        self._kill()

    def _damage(self) -> None:
        saved = self._training.directory / "saved"
        self._kill()
        # It is damaged before anything is read again: the launcher takes a moment to end the others.
        flip(CheckpointDir(saved).checkpoints[0], self._rng)


def soak(seconds: float = 600.0, every: float = 10.0, seed: int = 0) -> bool:
    """Whether a training came through so many seconds with the numbers of its twin; says what happened."""
    with _pair() as (training, twin):
        storm = Storm(training, seed)
        began, number = time.monotonic(), 0
        while time.monotonic() - began + every < seconds:
            time.sleep(max(0.0, began + (number + 1) * every - time.monotonic()))
            storm.strike(number)
            number += 1
        training.stop()
        losses = training.losses
        twin.wait_for_steps(len(losses), _PATIENCE_SECONDS)
        twin.stop()
        storm.tally.restarts = training.num_starts - 1
        left = [*left_over(training.scratch, training.directory), *left_over(twin.scratch, twin.directory)]
        return _told(storm.tally, losses, twin.losses[: len(losses)], left)


@contextmanager
def _pair() -> "Iterator[tuple[WatchedTraining, WatchedTraining]]":
    with ShortTraining.made(RANKS) as one, ShortTraining.made(RANKS) as other:
        # By the same plan the numbers are the same to the last bit.
        plan = (one.directory / "plan.json").read_bytes()
        (other.directory / "plan.json").write_bytes(plan)
        with WatchedTraining(one.directory, EVERY_STEPS) as training, WatchedTraining(other.directory, 1000) as twin:
            training.wait_for_steps(1, _PATIENCE_SECONDS)
            yield training, twin


def _told(tally: Tally, losses: list[float], wanted: list[float], left: list[str]) -> bool:
    differences = sum(ours != theirs for ours, theirs in zip(losses, wanted, strict=False))
    differences += abs(len(losses) - len(wanted))
    for name, count in tally.faults.items():
        print(f"{count:6} x {name}")
    print(f"{sum(tally.faults.values()):6} faults, {tally.restarts} restarts, {len(losses)} steps")
    print(f"{tally.lost:6} steps taken again, at most {tally.most_lost} after one fault (saved every {EVERY_STEPS})")
    print(f"{tally.lost_for_nothing:6} steps lost where it was asked to stop")
    print(f"{differences:6} differences to the twin that nothing happened to")
    print(f"{tally.longest_seconds:6.1f} s at most from a fault to the next step")
    print(f"{len(left):6} processes or files left behind {' '.join(left)}")
    return not (differences or tally.lost_for_nothing or left) and tally.longest_seconds <= _PATIENCE_SECONDS


if __name__ == "__main__":
    sys.exit(0 if soak(*map(float, sys.argv[1:3]), *map(int, sys.argv[3:4])) else 1)
