"""Time until all ranks have ended once one has failed, and the cost of a status entry."""

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
    """Everything that `make bench` shows about failing ranks."""
    return (ends(), entries())


def ends(repetitions: int = 5) -> Table:
    """Seconds from the failure of rank 1 until `launch` has raised and no process is left; the maximum."""

    def lines() -> Iterator[Line]:
        for name, fail, limit in (("exception", _raise, 2.0), ("kill -9", _kill, 5.0)):
            longest = max(_seconds(fail) for _ in range(repetitions))
            yield Line((name, f"{longest:.2f}"), longest, limit, at_least=False)

    return Table(f"{RANKS} ranks of which one fails, seconds until all have ended", ("failure", "seconds"), lines())


def entries(repetitions: int = 20) -> Table:
    """Microseconds to record one status entry; the minimum."""

    def lines() -> Iterator[Line]:
        with tempfile.TemporaryDirectory() as directory:
            status_file = StatusFile.create(directory, 0, 1)
            least = min(_seconds_per_entry(status_file) for _ in range(repetitions))
        yield Line(("waiting", f"{1e6 * least:.2f}"), 1e6 * least, 1.5, at_least=False)

    return Table("status entry, microseconds", ("entry", "microseconds"), lines())


def _seconds_per_entry(status_file: StatusFile, count: int = 2000) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        status_file.waiting(4, 6, 2)
    return (time.perf_counter() - begin) / count


def _seconds(fail: Callable[[], None]) -> float:
    with tempfile.NamedTemporaryFile() as file:
        try:
            penstock.launch(_broken, RANKS, fail, file.name)
        except penstock.RunError:
            # All processes of a host share this clock.
            return time.monotonic() - float(file.read())
    raise AssertionError("no rank failed")


def _broken(fail: Callable[[], None], path: str) -> None:
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
