"""breaking: how soon everything is down once a rank has broken, and what it costs to note what a rank is doing."""

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
    """Everything that `make bench` shows about broken ranks."""
    return (ends(), notes())


def ends(repetitions: int = 5) -> Table:
    """Seconds from the moment when rank 1 breaks until `launch` has raised and no process is left; the longest."""

    def lines() -> Iterator[Line]:
        for name, fate, limit in (("exception", _raise, 2.0), ("kill -9", _kill, 5.0)):
            longest = max(_seconds(fate) for _ in range(repetitions))
            yield Line((name, f"{longest:.2f}"), longest, limit, at_least=False)

    return Table(f"{RANKS} ranks of which one breaks, seconds until all are down", ("broken by", "seconds"), lines())


def notes(repetitions: int = 20) -> Table:
    """Microseconds of one note on the board of a rank; the least of many."""

    def lines() -> Iterator[Line]:
        with tempfile.TemporaryDirectory() as directory:
            board = StatusFile.create(directory, 0, 1)
            least = min(_note(board) for _ in range(repetitions))
        yield Line(("waiting", f"{1e6 * least:.2f}"), 1e6 * least, 1.5, at_least=False)

    return Table("a note on the board, microseconds", ("note", "microseconds"), lines())


def _note(board: StatusFile, count: int = 2000) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        board.waiting(4, 6, 2)
    return (time.perf_counter() - begin) / count


def _seconds(fate: Callable[[], None]) -> float:
    with tempfile.NamedTemporaryFile() as file:
        try:
            penstock.launch(_broken, RANKS, fate, file.name)
        except penstock.RunError:
            # The clock is one for all processes of a host.
            return time.monotonic() - float(file.read())
    raise AssertionError("no rank broke")


def _broken(fate: Callable[[], None], path: str) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(time.monotonic()))
        fate()
    dist.barrier()


def _raise() -> None:
    raise ValueError("broken on purpose")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
