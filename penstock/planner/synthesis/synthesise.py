"""Makes an order for given costs, placement and memory that is at least as good as any schedule of the table.

The schedules of the table are tried first. Then the search makes orders of its own, with backwards split and, where a
full backward takes less than its parts, whole. All orders are simulated, and the best that fits wins.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import Kind, Schedule, bytes_text
from penstock.passes import lower
from penstock.planner.synthesis import exact
from penstock.planner.synthesis.bounds import Bound, lower_bound
from penstock.planner.synthesis.evolve import search_orders, steady_orders
from penstock.planner.synthesis.local_search import Goal, join_backwards
from penstock.planner.synthesis.pass_table import PassTable
from penstock.planner.synthesis.problem import (
    B,
    F,
    RankOrders,
    ScheduleProblem,
    peak_bytes,
    rank_orders,
    to_schedule,
)
from penstock.schedules import SCHEDULES, build_on
from penstock.simulate import simulate

DEFAULT_BUDGET = 5.0
SYNTHESISED = "auto"
_SEARCH_SHARE = 0.9
"""the share of the effort that is for the search; the rest is for joining the parts of backwards"""
_FEWEST_ORDERS = 20
"""a search with effort for fewer orders is not begun, if the table has some"""
_MAX_PROVABLE_PASSES = 250
"""the most passes of a problem that the solver is given"""
_TIGHTENINGS = 5
"""how often a search is repeated with less memory, because received values did not fit besides the activations"""


class SimulatedOrder:
    """A schedule for a problem, its name, its seconds in the objective and its peak bytes."""

    def __init__(self, problem: ScheduleProblem, schedule: Schedule, name: str) -> None:
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


@dataclass(frozen=True)
class Synthesis:
    """The best order found, a proven bound, and the schedules of the table for comparison."""

    best: SimulatedOrder
    bound: Bound
    named: tuple[SimulatedOrder, ...]
    """the schedules of the table that fit, the best first; in a large problem those up to one that meets the bound"""

    @property
    def seconds(self) -> float:
        """Of a step, simulated, in the objective of the problem."""
        return self.best.seconds

    @property
    def gap(self) -> float:
        """How much longer than the bound a step is, as a share of the bound."""
        return self.seconds / self.bound.seconds - 1.0 if self.bound.seconds else 0.0


def synthesise(
    problem: ScheduleProblem, *, budget_seconds: float = DEFAULT_BUDGET, may_prove: bool = True
) -> Synthesis:
    """Returns the best order found with about that many seconds of CPU; the same one for the same problem.

    Where the solver is installed and the problem is small, it continues from there: to something better, or to a proof
    that there is nothing. Raises ScheduleError if no order fits in memory.
    """
    bound = lower_bound(problem)
    goal = Goal(bound.seconds, budget_seconds)
    is_large = is_too_large(problem, budget_seconds)
    named: list[SimulatedOrder] = []
    for order in table_orders(problem):
        if order.fits:
            named.append(order)
            if is_large and goal.is_met(order.seconds):
                break  # each takes seconds, and none is faster
    named.sort(key=_sort_key)
    found = list(named)
    # Which stages do not split their backward: none and, if there are any, those that are quicker that way.
    kinds = (Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    columns = zip(*(problem.costs.mean_seconds(kind) for kind in kinds), strict=True)
    quicker = frozenset(stage for stage, (whole, *parts) in enumerate(columns) if whole < sum(parts) * (1 - 1e-9))
    choices: list[frozenset[int]] = [frozenset(), quicker] if quicker else [frozenset()]
    if named and is_large:
        # In place of a search at most one run, whose steady state is good for any number of microbatches; none if the
        # effort is not enough for it.
        choices = choices[: goal.num_runs(1.0, problem.num_passes, (0, 1))]
    for unsplit in choices:
        if found and goal.is_met(min(map(_sort_key, found))[0]):
            break
        found += _search(problem, unsplit, goal.part(1 / len(choices)), named, bool(named) and is_large)
    found = found or [order for order in low_memory_orders(problem) if order.fits]
    if not found:
        raise _refusal(problem)
    made = Synthesis(min(found, key=_sort_key), bound, tuple(named))
    can_prove = may_prove and problem.num_passes <= _MAX_PROVABLE_PASSES and exact.can_prove(problem)
    if not can_prove or goal.is_met(made.seconds):
        return made
    proof = exact.prove(problem, rank_orders(made.best.schedule), bound.seconds, budget_seconds)
    bound = max(bound, Bound(proof.bound * (1 - 1e-9), "proven by the solver"))
    order = SimulatedOrder(problem, to_schedule(problem, proof.orders), SYNTHESISED)
    is_better = order.fits and order.seconds < made.seconds
    return replace(made, best=order if is_better else made.best, bound=bound)


def is_too_large(problem: ScheduleProblem, budget_seconds: float) -> bool:
    """Returns whether the budget is too short for a search that could improve on the schedules of the table."""
    return Goal(0.0, budget_seconds).num_runs(1.0, problem.num_passes, (0, _FEWEST_ORDERS)) < _FEWEST_ORDERS


def table_orders(problem: ScheduleProblem) -> Iterator[SimulatedOrder]:
    """Yields the schedules of the table that have the placement of the problem and may fit in its memory."""
    seen: list[Schedule] = []
    for name in SCHEDULES:
        plain = build_on(problem.placement, name, problem.num_microbatches)
        # With one stage per rank, some are the same. Moving weight gradients takes long, and so does simulating.
        if plain is None or plain in seen or _exceeds_memory(problem, plain):
            continue
        schedule = build_on(problem.placement, name, problem.num_microbatches, problem.costs)
        if schedule is not None and schedule not in seen:
            seen += [plain, schedule]
            yield SimulatedOrder(problem, schedule, name)


def _exceeds_memory(problem: ScheduleProblem, schedule: Schedule) -> bool:
    """Whether activations alone need more than the memory of a rank, wherever weight gradients are moved to."""
    if not problem.cluster.limits:
        return False
    # Every input gradient frees all that its microbatch holds, as if its weight gradient followed at once.
    kept = [costs.allocated(Kind.FORWARD) for costs in (problem.costs.least(), problem.costs.most())]
    changes = np.concatenate((kept[0], -kept[1], -kept[1], 0 * kept[1]), axis=1).ravel()
    return any(
        np.cumsum(changes[order]).max() > room for order, room in zip(rank_orders(schedule), problem.room, strict=True)
    )


def low_memory_orders(problem: ScheduleProblem) -> Iterator[SimulatedOrder]:
    """Yields an order for each number of microbatches in flight, from one up to the number of ranks.

    A microbatch goes through all stages and back, step by step; the next enters when one of those in flight has left.
    With one in flight nothing else is held or received, so that hardly any order needs less memory.
    """
    stages = range(problem.placement.num_stages)
    way = [stage << 2 | F for stage in stages] + [stage << 2 | B for stage in reversed(stages)]
    for in_flight in range(1, min(problem.num_microbatches, problem.placement.num_ranks) + 1):
        # Far enough apart that microbatch k has left when microbatch k + in_flight enters.
        apart = -(-len(way) // in_flight)
        passes = sorted(
            (microbatch * apart + step, microbatch, step)
            for microbatch in range(problem.num_microbatches)
            for step in range(len(way))
        )
        orders: RankOrders = [[] for _ in range(problem.placement.num_ranks)]
        for _, _, step in passes:
            orders[problem.placement.ranks[way[step] >> 2]].append(way[step])
        yield SimulatedOrder(problem, to_schedule(problem, orders), SYNTHESISED)


def _sort_key(order: SimulatedOrder) -> tuple[float, int]:
    return order.seconds, max(order.peaks)


def _search(
    problem: ScheduleProblem, unsplit: frozenset[int], goal: Goal, named: list[SimulatedOrder], is_large: bool
) -> Iterator[SimulatedOrder]:
    """An order in which these stages do not split their backward; none if the search finds nothing that fits."""
    narrow = problem
    if is_large:
        orders = steady_orders(PassTable.split(problem, unsplit))
        if orders is not None and (found := SimulatedOrder(problem, to_schedule(problem, orders), SYNTHESISED)).fits:
            yield found
        return
    for _ in range(_TIGHTENINGS):
        seeds = [rank_orders(order.schedule) for order in named]
        orders = search_orders(PassTable.split(narrow, unsplit), goal.part(_SEARCH_SHARE), seeds)
        if orders is None:
            return
        orders = join_backwards(narrow, orders, goal.part(1 - _SEARCH_SHARE))
        found = SimulatedOrder(problem, to_schedule(narrow, orders), SYNTHESISED)
        if found.fits:
            yield found
            return
        # Less memory on the ranks that need more than the activations of these orders.
        limits = list(narrow.cluster.limits)
        for rank, less in enumerate(found.excess):
            if less:
                unused = narrow.room[rank] - peak_bytes(narrow, orders[rank])
                limits[rank] = max(limits[rank] - less - floor(unused), 1)
        narrow = replace(narrow, cluster=replace(narrow.cluster, memory=tuple(limits)))


def _refusal(problem: ScheduleProblem) -> ScheduleError:
    """Names the tightest rank, its room, and the bytes of one microbatch there."""
    kept = [sum(problem.costs.kept_bytes[stage] for stage in stages) for stages in problem.placement.stages]
    rank = min(range(len(kept)), key=lambda each: problem.room[each] - kept[each])
    room = problem.room[rank]
    return ScheduleError(
        "no order fits in memory",
        rank=rank,
        state=bytes_text(problem.cluster.limits[rank] - int(room)),
        left_for_activations=bytes_text(max(int(room), 0)),
        activations_of_a_microbatch=bytes_text(kept[rank]),
        hint="more memory, more and smaller microbatches, recomputation, or more ranks",
    )
