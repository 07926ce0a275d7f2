"""seeds: the schedules of the table that lie on the ranks as a problem's stages do."""

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedules import SCHEDULES, build
from penstock.synthesis.order import Order
from penstock.synthesis.problem import Problem


def seeds(problem: Problem) -> Iterator[Order]:
    """One order per name, weight gradients moved into the gaps of the stages as they are."""
    placement = problem.placement
    per_rank, rest = divmod(placement.num_stages, placement.num_ranks)
    if rest:
        return
    for name in SCHEDULES:
        try:
            schedule = build(name, placement.num_ranks, problem.num_microbatches, per_rank, problem.costs)
        except ScheduleError:
            # Some work with one or with two stages per rank only.
            continue
        if schedule.placement == placement:
            yield Order(problem, schedule, name)
