"""faults: training runs with injected faults must have the losses of a run without faults, bit for bit."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.checkpoint_checks import checkpoint_checks
from benchmarks.short_training import RANKS, STEPS, Outcome, ShortTraining
from benchmarks.table import Line, Table
from benchmarks.watched_training import WatchedTraining
from penstock.checkpoint import verify_checkpoints

KINDS = ("kill", "abort", "raise", "exit")
_POLL_SECONDS = 0.005
_TIMEOUT_SECONDS = 300.0
_MAX_ACTIONS = 20
"""a fault is injected before one of the first actions of a step"""
_FILE_OPERATIONS = {0: 36, 1: 14, 2: 14}
"""about how many file operations each rank needs for the checkpoints of one run"""


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    # One table for each fault, so that none takes longer than a few minutes.
    return (*(injected_faults([name]) for name in (*FAULTS, FULL_DISK)), checkpoint_checks(), restart_times())


def restart_times(times: int = 5) -> Table:
    """Maximum seconds from killing a rank until another rank ends, until all have ended, and until the next step."""

    def lines() -> Iterator[Line]:
        with ShortTraining.made() as made, WatchedTraining(made.directory, every=20) as training:
            training.wait_for_steps(5, _TIMEOUT_SECONDS)
            found = [_kill_rank(training, number % RANKS) for number in range(times)]
        targets = {"another ends": 1.0, "all ended": 5.0, "next step": 15.0}
        for (name, target), seconds in zip(targets.items(), zip(*found, strict=True), strict=True):
            yield Line((name, f"{max(seconds):.2f}"), max(seconds), target, at_least=False)

    return Table(f"one of {RANKS} ranks killed, seconds until", ("until", "seconds"), lines())


def _kill_rank(training: WatchedTraining, rank: int) -> tuple[float, float, float]:
    others, start = [pid for other, pid in enumerate(training.pids) if other != rank], time.monotonic()
    training.signal_rank(rank, signal.SIGKILL)
    first_ended = _seconds_until(start, lambda: not all(map(_is_alive, others)))
    all_ended = _seconds_until(start, lambda: not any(map(_is_alive, others)))
    training.resumed(_TIMEOUT_SECONDS)
    next_step = time.monotonic() - start
    training.wait_for_steps(training.num_steps + 30, _TIMEOUT_SECONDS)
    return first_ended, all_ended, next_step


def _seconds_until(start: float, condition: Callable[[], bool]) -> float:
    while not condition():
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - start


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def injected_faults(names: Sequence[str], rounds: int = 40) -> Table:
    """Counts the rounds in which a run with a fault succeeds with all losses of a run without."""

    def lines() -> Iterator[Line]:
        with ShortTraining.made() as training:
            clean = training.run()
            assert clean.exit_code == 0, clean.output
            for name in names:
                if name == FULL_DISK:
                    yield _line(name, 1, int(_survives_full_disk(training, clean)))
                else:
                    yield _line(name, rounds, _count_identical(training, clean, rounds, FAULTS[name]))

    return Table(f"injected faults: {', '.join(names)}", ("fault", "rounds", "passed"), lines())


def _line(name: str, rounds: int, passed: int) -> Line:
    return Line((name, str(rounds), str(passed)), passed, rounds)


def _count_identical(
    training: ShortTraining, clean: Outcome, rounds: int, fault: Callable[[random.Random], str]
) -> int:
    identical = 0
    for number in range(rounds):
        found = training.run([fault(random.Random(number))])
        identical += is_as_clean(found, clean) and found.restarts == 1
    return identical


def is_as_clean(found: Outcome, clean: Outcome) -> bool:
    """Whether a run succeeded with the losses of a run without faults, and left no incomplete checkpoint."""
    return found.exit_code == 0 and found.losses == clean.losses and not found.bad


def _anywhere(rng: random.Random) -> str:
    place = f"rank={rng.randrange(RANKS)},step={rng.randrange(STEPS)},action={rng.randrange(_MAX_ACTIONS)}"
    return f"{rng.choice(KINDS)},{place}"


def _in_a_save(rng: random.Random) -> str:
    rank = rng.randrange(RANKS)
    return f"kill,rank={rank},save={rng.randint(1, _FILE_OPERATIONS[rank])}"


FAULTS = {"killed at random": _anywhere, "killed in a save": _in_a_save}
"""functions that draw a fault for `--fault`, by name"""
FULL_DISK = "full disk"


def _survives_full_disk(training: ShortTraining, clean: Outcome) -> bool:
    """Whether training on a full disk continues with a message, and older checkpoints still load."""
    with _small_disk(training.directory / "saved") as is_real:
        faults = () if is_real else ("full-disk,rank=1,step=6", "full-disk,rank=1,step=9", "full-disk,rank=1,step=10")
        shutil.rmtree(training.directory / "out", ignore_errors=True)
        found = training.run(faults, "--restarts", "0", fresh=False)
        continues = found.losses == clean.losses
        loads = [one.name for one in verify_checkpoints(training.directory / "saved") if not one.problem]
        return continues and bool(loads) and not found.bad and "the last checkpoint was not written" in found.output


@contextmanager
def _small_disk(place: Path) -> Iterator[bool]:
    """Mounts a file system with room for one checkpoint; yields False if that is not permitted."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    size = "size=160k,mode=700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", os.fspath(place)], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", os.fspath(place)], check=True)
