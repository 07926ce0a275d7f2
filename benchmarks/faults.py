"""Trainings with injected faults have the losses of an undisturbed one."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.guarded import guarded
from benchmarks.short_training import RANKS, STEPS, Outcome, ShortTraining
from benchmarks.table import Line, Table
from benchmarks.watched_training import WatchedTraining
from penstock.checkpoint import verify_checkpoints

KINDS = ("kill", "abort", "raise", "exit")
_LOOK_SECONDS = 0.005
_PATIENCE_SECONDS = 300.0
_MOST_NOTES = 20
_MOST_FILES = {0: 36, 1: 14, 2: 14}
"""number of file operations that a rank needs for the checkpoints of one training, roughly"""


def tables() -> tuple[Table, ...]:
    """Everything that `python -m benchmarks faults` shows."""
    # A table for each, so that none takes longer than a few minutes.
    return (*(injected_faults([name]) for name in (*FAULTS, FULL_DISK)), guarded(), restart_times())


def restart_times(times: int = 5) -> Table:
    """Seconds from killing a rank until another one ends, all have ended, and the next step is taken; the maximum."""

    def lines() -> Iterator[Line]:
        with ShortTraining.made() as made, WatchedTraining(made.directory, every=20) as training:
            training.wait_for_steps(5, _PATIENCE_SECONDS)
            found = [_broken(training, number % RANKS) for number in range(times)]
        limits = {"another ends": 1.0, "all ended": 5.0, "next step": 15.0}
        for (name, limit), seconds in zip(limits.items(), zip(*found, strict=True), strict=True):
            yield Line((name, f"{max(seconds):.2f}"), max(seconds), limit, at_least=False)

    return Table(f"a rank of {RANKS} is killed, seconds", ("until", "seconds"), lines())


def _broken(training: WatchedTraining, rank: int) -> tuple[float, float, float]:
    others, began = [pid for place, pid in enumerate(training.pids) if place != rank], time.monotonic()
    training.signal_rank(rank, signal.SIGKILL)
    first = _seconds_until(began, lambda: not all(map(_is_alive, others)))
    down = _seconds_until(began, lambda: not any(map(_is_alive, others)))
    training.resumed(_PATIENCE_SECONDS)
    again = time.monotonic() - began
    training.wait_for_steps(training.num_steps + 30, _PATIENCE_SECONDS)
    return first, down, again


def _seconds_until(began: float, is_so: Callable[[], bool]) -> float:
    while not is_so():
        time.sleep(_LOOK_SECONDS)
    return time.monotonic() - began


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def injected_faults(names: Sequence[str], rounds: int = 40) -> Table:
    """In how many rounds the run succeeds with every loss of an undisturbed one, by the names of faults."""

    def lines() -> Iterator[Line]:
        with ShortTraining.made() as training:
            clean = training.run()
            assert clean.exit_code == 0, clean.output
            for name in names:
                if name == FULL_DISK:
                    yield _line(name, 1, int(_without_room(training, clean)))
                else:
                    yield _line(name, rounds, _survived(training, clean, rounds, FAULTS[name]))

    return Table(f"injected faults: {', '.join(names)}", ("fault", "rounds", "good"), lines())


def _line(name: str, rounds: int, good: int) -> Line:
    return Line((name, str(rounds), str(good)), good, rounds)


def _survived(training: ShortTraining, clean: Outcome, rounds: int, fault: Callable[[random.Random], str]) -> int:
    good = 0
    for number in range(rounds):
        found = training.run([fault(random.Random(number))])
        good += is_as_clean(found, clean) and found.restarts == 1
    return good


def is_as_clean(found: Outcome, clean: Outcome) -> bool:
    """Whether a training succeeded, with the losses of an undisturbed one and no incomplete checkpoint."""
    return found.exit_code == 0 and found.losses == clean.losses and not found.bad


def _anywhere(rng: random.Random) -> str:
    place = f"rank={rng.randrange(RANKS)},step={rng.randrange(STEPS)},action={rng.randrange(_MOST_NOTES)}"
    return f"{rng.choice(KINDS)},{place}"


def _in_a_save(rng: random.Random) -> str:
    rank = rng.randrange(RANKS)
    return f"kill,rank={rank},save={rng.randint(1, _MOST_FILES[rank])}"


FAULTS = {"killed at random": _anywhere, "killed in a save": _in_a_save}
"""specifications of random faults, by name"""
FULL_DISK = "full disk"


def _without_room(training: ShortTraining, clean: Outcome) -> bool:
    """On a full disk training continues with a message, and older checkpoints still load."""
    with _small_disk(training.directory / "saved") as is_real:
        faults = () if is_real else ("full-disk,rank=1,step=6", "full-disk,rank=1,step=9", "full-disk,rank=1,step=10")
        shutil.rmtree(training.directory / "out", ignore_errors=True)
        found = training.run(faults, "--restarts", "0", fresh=False)
        continues = found.losses == clean.losses
        loads = [one.name for one in verify_checkpoints(training.directory / "saved") if not one.problem]
        return continues and bool(loads) and not found.bad and "the last checkpoint was not written" in found.output


@contextmanager
def _small_disk(place: Path) -> Iterator[bool]:
    """Mount a file system with room for one checkpoint; yields False if that is not possible."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    size = "size=160k,mode=700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", os.fspath(place)], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", os.fspath(place)], check=True)
