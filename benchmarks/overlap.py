"""Steps of two replicas on two hosts joined by a 200 Mbit/s link: averaging gradients runs beside the passes.

Passes sleep, so that cores do not matter. `compute` is the simulated step without replicas. `link` is the time of
averaging all gradients without any pass, which gives the bandwidth of the simulation. `simulated` is the simulated step
with both: the gradients of a stage are averaged from its last backward on, beside the passes of other stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import penstock
from benchmarks import overlap_rank
from benchmarks.hosts import NoHostsError, run_on_hosts
from benchmarks.overlap_rank import RANKS, Task
from benchmarks.table import Line, Table

TASKS = (
    Task("compute", stage_bytes=600_000),
    Task("both", stage_bytes=3_000_000),
    Task("link", microbatches=2, unit=0.008, stage_bytes=8_000_000),
    Task("1f1b", "1f1b", stages_per_rank=1, microbatches=8, unit=0.04, stage_bytes=4_000_000),
    Task("interleaved", "interleaved", stages_per_rank=4, microbatches=8, stage_bytes=600_000),
)
_LONGER = ("compute", "link", "interleaved")
"""settings in which one of both takes so long that it hides the other, except for the first or last stage"""
_LIMIT = 1.05
_MOST_SECONDS = 180.0


def tables() -> tuple[Table, ...]:
    """Everything that `make bench` shows about overlap."""
    return (replicas(),)


def replicas(tasks: Sequence[Task] = TASKS) -> Table:
    """The measured step against the simulated one, and against the longer of compute and communication."""

    def lines() -> Iterator[Line]:
        try:
            ranks = run_on_hosts(Path(overlap_rank.__file__), RANKS, [asdict(task) for task in tasks], _MOST_SECONDS)
        except NoHostsError as reason:
            yield Line((f"not here: {reason}", *[""] * 6), 0.0, 0.0)
            return
        for task in tasks:
            found = [rank[task.name] for rank in ranks]
            program = penstock.lower(task.build_schedule())
            compute = penstock.simulate(program, task.costs).makespan
            link = max(rank["alone"] for rank in found)
            bandwidth = task.stages_per_rank * task.stage_bytes / link
            cluster = penstock.Cluster(RANKS, replicas=penstock.Replicas(2, bandwidth=bandwidth))
            simulated = penstock.simulate(program, task.costs, cluster).makespan
            step = median(max(steps) for steps in zip(*(rank["steps"] for rank in found), strict=True))
            seconds = (f"{value:.3f}" for value in (compute, link, simulated, step))
            cells = (task.name, *seconds)
            yield Line((*cells, "simulated", f"{step / simulated:.3f}"), step / simulated, _LIMIT, at_least=False)
            if task.name in _LONGER:
                ratio = step / max(compute, link)
                yield Line((task.name, *[""] * 4, "longer", f"{ratio:.3f}"), ratio, _LIMIT, at_least=False)

    columns = ("mostly", "compute", "link", "simulated", "measured", "against", "ratio")
    return Table("two replicas over 200 Mbit/s, seconds per step; median", columns, lines())
