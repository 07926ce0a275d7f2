"""Gain of planning with measured links, on two hosts joined by a 200 Mbit/s link."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import two_hosts_rank
from benchmarks.hosts import NoHostsError, run_on_hosts
from benchmarks.table import Line, Table
from benchmarks.two_hosts_rank import Task

TASK = Task(wide=64, narrow=4, samples=8192, steps=12)
RANKS = 2
"""ranks on each host"""
_MOST_SECONDS = 240.0
Found = dict[str, Any]


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about two hosts."""
    return links(), gains()


def links(task: Task = TASK, ranks: int = RANKS) -> Table:
    """Measured bandwidth and latency between the hosts, and inside a host."""

    def lines(found: Found) -> Iterator[Line]:
        for name, is_slow in (("two hosts", True), ("one host", False)):
            own = [link for link in found["links"] if ((link["source"] < ranks) != (link["target"] < ranks)) is is_slow]
            if own:
                rate = 8e-6 * median(link["bandwidth"] for link in own)
                delay = 1e6 * median(link["latency"] for link in own)
                yield Line((name, f"{rate:,.0f}", f"{delay:,.0f}"), rate, 210.0 if is_slow else 1000.0, not is_slow)

    return Table("links between ranks of", ("", "Mbit/s", "us latency"), _found(task, ranks, lines, 3))


def gains(task: Task = TASK, ranks: int = RANKS) -> Table:
    """A step with the plan for free links, and with the plan for the measured ones."""

    def lines(found: Found) -> Iterator[Line]:
        blind, seeing = found["without links"], found["with links"]
        for name, key, unit, target in (
            ("KiB between hosts", "bytes", 1 / 1024, 4.0),
            ("ms predicted", "predicted", 1e3, 1.2),
            ("ms measured", "seconds", 1e3, 1.2),
        ):
            ratio = blind[key] / seeing[key]
            yield Line((name, f"{unit * blind[key]:,.1f}", f"{unit * seeing[key]:,.1f}", f"{ratio:.2f}"), ratio, target)
        apart = f"{blind['apart']:.1e}", f"{seeing['apart']:.1e}"
        yield Line(("from one process", *apart, ""), max(blind["apart"], seeing["apart"]), 1e-12, at_least=False)

    title = f"a step on two hosts, {ranks} ranks each"
    return Table(title, ("", "without links", "with links", "ratio"), _found(task, ranks, lines, 4))


def _found(task: Task, ranks: int, lines: Callable[[Found], Iterator[Line]], columns: int) -> Iterator[Line]:
    try:
        yield from lines(measured(task, ranks))
    except NoHostsError as reason:
        yield Line((f"not here: {reason}", *[""] * (columns - 1)), 0.0, 0.0)


@cache
def measured(task: Task, ranks: int) -> Found:
    """The results of the first rank, with the seconds of the slowest rank."""
    found = run_on_hosts(Path(two_hosts_rank.__file__), ranks, asdict(task), _MOST_SECONDS)
    for plan in ("without links", "with links"):
        for key in ("seconds", "apart"):
            found[0][plan][key] = max(one[plan][key] for one in found)
    return found[0]
