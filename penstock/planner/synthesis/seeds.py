"""seeds: the schedules of the table that lie on the ranks as a problem's stages do."""

from collections.abc import Iterator

from penstock.planner.synthesis.order import Order
from penstock.planner.synthesis.problem import Problem
from penstock.schedules import SCHEDULES, build_on


def seeds(problem: Problem) -> Iterator[Order]:
    """One order per name, weight gradients moved into the gaps of the stages as they are."""
    for name in SCHEDULES:
        schedule = build_on(problem.placement, name, problem.num_microbatches, problem.costs)
        if schedule is not None:
            yield Order(problem, schedule, name)
