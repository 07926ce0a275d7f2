"""making: an order for given costs, placement and memory that is at least as good as any schedule of the table.

The schedules of the table are tried first. Then the search makes orders of its own, with backwards split and, where a
full backward takes less than its parts, whole. What it finds is simulated like all others, and the best that fits wins.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import floor

from penstock.errors import ScheduleError
from penstock.ir import bytes_text
from penstock.planner.synthesis import exact
from penstock.planner.synthesis.bound import Bound, lower_bound
from penstock.planner.synthesis.goal import Goal
from penstock.planner.synthesis.joining import joined
from penstock.planner.synthesis.order import Order
from penstock.planner.synthesis.problem import Problem
from penstock.planner.synthesis.rows import Rows
from penstock.planner.synthesis.search import search
from penstock.planner.synthesis.seeds import seeds
from penstock.planner.synthesis.shop import Shop, Words
from penstock.planner.synthesis.thrifty import thrifty
from penstock.planner.synthesis.words import peak, schedule_of, words_of

DEFAULT_BUDGET = 5.0
SYNTHESISED = "auto"
_SEARCH = 0.9
"""the share of the effort that is for the search; the rest is for joining the parts of backwards"""
_FEWEST_ORDERS = 20
"""a search that could not place so many orders with its effort is not begun, if the table has some"""
_PROVABLE = 250
"""the most passes of a problem that the solver is given"""
_TIGHTENINGS = 5
"""how often a search is repeated with less memory, because received values did not fit beside the activations"""


@dataclass(frozen=True)
class Synthesis:
    """The best order that was found, and how good the others were."""

    best: Order
    bound: Bound
    named: tuple[Order, ...]
    """the schedules of the table that fit, the best first"""

    @property
    def seconds(self) -> float:
        """Of a step, simulated, in the objective of the problem."""
        return self.best.seconds

    @property
    def gap(self) -> float:
        """How much longer than the bound a step is, as a share of the bound."""
        return self.seconds / self.bound.seconds - 1.0 if self.bound.seconds else 0.0


def synthesise(problem: Problem, *, budget_seconds: float = DEFAULT_BUDGET, may_prove: bool = True) -> Synthesis:
    """The best order that is found with about so many seconds of CPU; the same one for the same problem.

    Where the solver is installed and the problem is small, it goes on from there: to something better, or to a proof
    that there is nothing. Raises ScheduleError if no order fits in memory.
    """
    bound = lower_bound(problem)
    goal = Goal(bound.seconds, budget_seconds)
    named = sorted((order for order in seeds(problem) if order.fits), key=_rank)
    found = list(named)
    ways = () if named and is_too_large(problem, budget_seconds) else tuple(_ways(problem))
    for whole in ways:
        if found and goal.is_met(min(map(_rank, found))[0]):
            break
        found += _searched(problem, whole, goal.part(1 / len(ways)), named)
    found = found or [order for order in thrifty(problem, SYNTHESISED) if order.fits]
    if not found:
        raise _refusal(problem)
    made = Synthesis(min(found, key=_rank), bound, tuple(named))
    can_prove = may_prove and problem.num_passes <= _PROVABLE and exact.can_prove(problem)
    return _proven(made, budget_seconds) if can_prove and not goal.is_met(made.seconds) else made


def is_too_large(problem: Problem, budget_seconds: float) -> bool:
    """Whether there is no time for a search that has a chance to find something better than the table has."""
    return Goal(0.0, budget_seconds).runs(1.0, problem.num_passes, (0, _FEWEST_ORDERS)) < _FEWEST_ORDERS


def _proven(made: Synthesis, seconds: float) -> Synthesis:
    """With what the solver finds out."""
    problem = made.best.problem
    proof = exact.prove(problem, words_of(made.best.schedule), made.bound.seconds, seconds)
    bound = max(made.bound, Bound(proof.bound * (1 - 1e-9), "proven by the solver"))
    order = Order(problem, schedule_of(Shop.of(problem), proof.words), SYNTHESISED)
    is_better = order.fits and order.seconds < made.seconds
    return replace(made, best=order if is_better else made.best, bound=bound)


def _rank(order: Order) -> tuple[float, int]:
    return order.seconds, max(order.peaks)


def _ways(problem: Problem) -> Iterator[frozenset[int]]:
    """Which stages do not split their backward: none, and those that are quicker so."""
    yield frozenset()
    costs = problem.costs
    columns = zip(costs.backward, costs.input_grad, costs.weight_grad, strict=True)
    quicker = frozenset(stage for stage, (whole, *parts) in enumerate(columns) if whole < sum(parts) * (1 - 1e-9))
    if quicker:
        yield quicker


def _searched(problem: Problem, whole: frozenset[int], goal: Goal, named: list[Order]) -> Iterator[Order]:
    """An order with these stages whole; none if the search finds nothing that fits."""
    narrow = problem
    for _ in range(_TIGHTENINGS):
        shop = Shop.of(narrow)
        words = search(Rows.split(shop, whole), goal.part(_SEARCH), [words_of(order.schedule) for order in named])
        if words is None:
            return
        words = joined(shop, words, goal.part(1 - _SEARCH))
        order = Order(problem, schedule_of(shop, words), SYNTHESISED)
        if order.fits:
            yield order
            return
        narrow = _narrowed(shop, words, order.excess)


def _narrowed(shop: Shop, words: Words, excess: tuple[int, ...]) -> Problem:
    """The problem with less memory on the ranks that need more than the activations of these words."""
    limits = list(shop.problem.cluster.limits)
    for rank, less in enumerate(excess):
        if less:
            unused = shop.room[rank] - peak(shop, words[rank])
            limits[rank] = max(limits[rank] - less - floor(unused), 1)
    return replace(shop.problem, cluster=replace(shop.problem.cluster, memory=tuple(limits)))


def _refusal(problem: Problem) -> ScheduleError:
    """Says what the tightest rank has, and what one microbatch takes there."""
    kept = [sum(problem.costs.activation_bytes[stage] for stage in stages) for stages in problem.placement.stages]
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
