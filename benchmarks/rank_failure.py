"""rank_failure: seconds from the failure of a rank until all ranks have ended, and the time of a status entry."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator

import torch.distributed as dist

import penstock
from benchmarks.table import Line, Table
from penstock.launch import StatusFile

RANKS = 4


def tables() -> tuple[Table, ...]:
    """All tables of this benchmark."""
    return (ends(), entries())


def ends(repetitions: int = 5) -> Table:
    """Seconds from the failure of rank 1 until `launch` has raised and no process is left; the maximum."""

    def lines() -> Iterator[Line]:
        for name, fail, target in (("exception", _raise, 2.0), ("kill -9", _kill, 5.0)):
            longest = max(_seconds(fail) for _ in range(repetitions))
            yield Line((name, f"{longest:.2f}"), longest, target, at_least=False)

    return Table(f"one of {RANKS} ranks fails, maximum seconds until all have ended", ("failure", "seconds"), lines())


def entries(repetitions: int = 20) -> Table:
    """Microseconds to write one status entry; the minimum."""

    def lines() -> Iterator[Line]:
        with tempfile.TemporaryDirectory() as directory:
            status_file = StatusFile.create(directory, 0, 1)
            shortest = min(_seconds_per_entry(status_file) for _ in range(repetitions))
        yield Line(("waiting", f"{1e6 * shortest:.2f}"), 1e6 * shortest, 1.5, at_least=False)

    return Table("status entry, microseconds", ("entry", "microseconds"), lines())


def _seconds_per_entry(status_file: StatusFile, count: int = 2000) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        status_file.waiting(4, 6, 2)
    return (time.perf_counter() - begin) / count


def _seconds(fail: Callable[[], None]) -> float:
    with tempfile.NamedTemporaryFile() as file:
        try:
            penstock.launch(_run_rank, RANKS, fail, file.name)
        except penstock.RunError:
            # The monotonic clock is the same for all processes of a host.
            return time.monotonic() - float(file.read())
    raise AssertionError("no rank failed")


def _run_rank(fail: Callable[[], None], path: str) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(time.monotonic()))
        fail()
    dist.barrier()


def _raise() -> None:
    raise ValueError("broken on purpose")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
