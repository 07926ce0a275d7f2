"""Runs: schedules built, proven and simulated with the options of a command."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cli.options import Sizes, Times
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.ir import Program, Schedule, Trace


class Run(NamedTuple):
    """One schedule of the table and what it was simulated to do."""

    name: str
    schedule: "Schedule"
    trace: "Trace"

    def figures(self) -> dict[str, Any]:
        """What programs read of a run."""
        from penstock.views import summary

        found = summary(self.trace)
        sizes = {
            "ranks": self.schedule.num_ranks,
            "stages_per_rank": self.schedule.num_stages // self.schedule.num_ranks,
            "microbatches": self.schedule.num_microbatches,
        }
        return {"schedule": self.name, **sizes, **found._asdict(), "idle": found.idle._asdict()}


def run(name: str, sizes: Sizes, times: Times) -> Run:
    """Build the schedule; where passes differ in length, weight gradients go where they fill gaps; prove; simulate."""
    import penstock

    build = partial(penstock.schedule, name, sizes.ranks, sizes.microbatches, stages_per_rank=sizes.stages_per_rank)
    schedule = build()
    if not times.are_equal:
        schedule = build(costs=times.costs(schedule.placement))
    program = penstock.lower(schedule)
    penstock.verify(program)
    return Run(name, schedule, timed(program, times))


def prove(orders: "Schedule | Program", in_flight: int | None = None) -> None:
    """Refuse orders that are not proven; a schedule is proven as it is, and as the program that it is lowered to."""
    import penstock

    penstock.verify(orders, in_flight=in_flight)
    if isinstance(orders, penstock.Schedule):
        penstock.verify(penstock.lower(orders))


def timed(program: "Program", times: Times) -> "Trace":
    """The trace of a program with the options' costs and links."""
    import penstock

    return penstock.simulate(program, times.costs(program.placement), times.cluster(program.num_ranks))


def chosen(name: str, sizes: Sizes) -> tuple[list[str], list[str]]:
    """The schedules that a name stands for, and those left out of "all" because they want other stages per rank."""
    from penstock.schedules import SCHEDULES, find

    if name.lower() != "all":
        return [find(name).name], []
    wanted = sizes.stages_per_rank
    misfits = [key for key, member in SCHEDULES.items() if wanted and member.choices and wanted not in member.choices]
    return [key for key in SCHEDULES if key not in misfits], misfits


def swept(sizes: Sizes, sweep: str | None) -> Iterable[Sizes]:
    """The sizes for every number of microbatches in a text such as `4,8,16`; without one, the sizes as they are."""
    if sweep is None:
        return [sizes]
    try:
        counts = dict.fromkeys(map(int, sweep.split(",")))
    except ValueError:
        raise PenstockError("not a list of numbers of microbatches", sweep=repr(sweep), hint="--sweep 4,8,16") from None
    return [replace(sizes, microbatches=count) for count in counts]
