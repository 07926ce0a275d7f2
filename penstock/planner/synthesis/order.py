"""Order: a schedule that suits a problem, with what the simulator says about it."""

from functools import cached_property

from penstock.ir import Schedule
from penstock.passes import lower
from penstock.planner.synthesis.problem import Problem
from penstock.simulate import simulate


class Order:
    """A schedule, where it comes from, its seconds in the objective and the bytes that it holds."""

    def __init__(self, problem: Problem, schedule: Schedule, name: str) -> None:
        self.problem, self.schedule, self.name = problem, schedule, name
        trace = simulate(lower(schedule, cuts=problem.cuts), problem.costs, problem.cluster)
        self.seconds = float(trace.span if problem.objective == "span" else trace.makespan)
        self.peaks = tuple(int(trace.peak_bytes(rank)) for rank in range(schedule.num_ranks))

    @cached_property
    def excess(self) -> tuple[int, ...]:
        """Bytes per rank beyond its memory."""
        limits = self.problem.cluster.limits or self.peaks
        return tuple(max(peak - limit, 0) for peak, limit in zip(self.peaks, limits, strict=True))

    @property
    def fits(self) -> bool:
        """Whether every rank keeps within its memory."""
        return not any(self.excess)
