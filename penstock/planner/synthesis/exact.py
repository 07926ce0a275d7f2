"""The optimum of a small problem, or a better bound, by the constraint solver CP-SAT (the extra `solver`).

The solver counts in whole ticks. Every duration is rounded down to ticks, so that its bound holds for the true seconds
as well. Where all durations are whole ticks, nothing is lost.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import pairwise
from math import floor, gcd, inf
from typing import Any, NamedTuple

from penstock.errors import ScheduleError
from penstock.planner.synthesis.evaluate import evaluate
from penstock.planner.synthesis.local_search import Goal, join_backwards, make_legal
from penstock.planner.synthesis.pass_table import ROWS_OF_KIND, PassTable
from penstock.planner.synthesis.problem import F, I, RankOrders, ScheduleProblem, W

_TICKS = 2_000
"""ticks of the longest duration, if durations are not whole numbers"""
_JOINING = 0.1
"""the effort, as a share of the limit, to join backwards that are quicker whole: the solver splits them all"""


class Proof(NamedTuple):
    """The best orders known, their seconds, and seconds that no order can undercut."""

    orders: RankOrders
    seconds: float
    bound: float

    @property
    def is_optimal(self) -> bool:
        """Whether the seconds equal the bound up to rounding."""
        return self.seconds <= self.bound * (1 + 1e-9)


def prove(problem: ScheduleProblem, known: RankOrders, bound: float, limit_seconds: float = 60.0) -> Proof:
    """Searches for orders shorter than the known ones, and for a proof that there are none.

    `bound` is one that is proven already.
    """
    if not _is_supported(problem):
        problem_text = "the solver supports only makespans of equal microbatches without overlapped pairs"
        raise ScheduleError(problem_text, objective=problem.objective)
    cp_model = load()
    model = _Model(cp_model.CpModel(), PassTable.least(problem))
    seconds = evaluate(problem, known).length
    # In ticks an order is at most as long, and up to a tick shorter: both limits round down.
    model.limit(model.whole(seconds - problem.step_seconds), floor((bound - problem.step_seconds) / model.tick))
    model.hint(known)
    solver = cp_model.CpSolver()
    # Counted by the solver itself, not by the clock, so that equal problems get equal answers; the clock is a cap.
    solver.parameters.max_deterministic_time = limit_seconds
    solver.parameters.max_time_in_seconds = 2 * limit_seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model.model)
    proven = bound
    if status != cp_model.UNKNOWN:
        proven = max(bound, solver.best_objective_bound * model.tick + problem.step_seconds)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proof(known, seconds, min(proven, seconds))
    # Passes of 0 ticks start at the same moment, in any order; memory may require a certain one.
    orders = [make_legal(problem, rank, order) or order for rank, order in enumerate(model.orders(solver))]
    orders = join_backwards(problem, orders, Goal(bound, _JOINING * limit_seconds))
    found = evaluate(problem, orders).length
    best = (orders, found) if found < seconds else (known, seconds)
    return Proof(*best, min(proven, best[1]))


def can_prove(problem: ScheduleProblem) -> bool:
    """Returns whether the solver is installed and supports the problem."""
    return _is_supported(problem) and find_spec("ortools") is not None


def _is_supported(problem: ScheduleProblem) -> bool:
    is_equal = problem.unequal_seconds is None
    return problem.objective == "makespan" and not problem.cluster.overlap and is_equal


def load() -> Any:
    """Returns the library, or raises an error that names the extra."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ScheduleError("the solver is not installed", hint="pip install 'penstock[solver]'") from None
    return cp_model


class _Model:
    """The passes of a problem as variables: when each starts, in ticks."""

    def __init__(self, model: Any, table: PassTable) -> None:
        self.model, self.table = model, table
        of_needs = (duration for need in table.needs for duration in (need.occupied, need.latency))
        durations = [*table.seconds.tolist(), *of_needs]
        is_whole = all(float(duration).is_integer() for duration in durations)
        self.tick = float(gcd(*map(int, durations)) or 1) if is_whole else max(durations) / _TICKS
        """the seconds of a tick"""
        self.ticks = [self.whole(seconds) for seconds in table.seconds]
        horizon = sum(self.ticks) * table.problem.num_microbatches + sum(self.whole(need.lag) for need in table.needs)
        self.horizon = max(2 * horizon, 1)
        self.starts = [
            [model.new_int_var(0, self.horizon, "") for _ in range(table.problem.num_microbatches)]
            for _ in range(table.num_rows)
        ]
        self.length = model.new_int_var(0, self.horizon, "")
        for row, starts in enumerate(self.starts):
            for before, after in pairwise(starts):
                model.add(after >= before + self.ticks[row])
            model.add(self.length >= starts[-1] + self.ticks[row])
        for need in table.needs:
            for before, after in self._pairs(need.needed, need.row) if need.link < 0 else ():
                model.add(after >= before + self.ticks[need.needed] + self.whole(need.latency))
        for rows in table.rows_of_rank:
            model.add_no_overlap([self._fixed(start, self.ticks[row]) for row in rows for start in self.starts[row]])
        self._share_memory()
        self._send()
        model.minimize(self.length)

    def whole(self, seconds: float) -> int:
        """Returns whole ticks, never more than the seconds."""
        return floor(seconds / self.tick * (1 + 1e-12))

    def limit(self, most: int, least: int) -> None:
        """Constrains the length."""
        self.model.add(self.length <= most)
        self.model.add(self.length >= min(least, most))

    def hint(self, orders: RankOrders) -> None:
        """Starts the search from known orders."""
        done = dict[int, int]()
        for order, ends in zip(orders, evaluate(self.table.problem, orders).ends, strict=True):
            for pass_id, end in zip(order, ends, strict=True):
                start = end - self.table.problem.seconds[pass_id]
                for part in ROWS_OF_KIND[pass_id & 3]:
                    row = 3 * (pass_id >> 2) + part
                    microbatch = done.get(row, 0)
                    done[row] = microbatch + 1
                    self.model.add_hint(self.starts[row][microbatch], self.whole(start))
                    start += self.table.seconds[row]

    def orders(self, solver: Any) -> RankOrders:
        """Returns the orders of the solution."""
        found = []
        for rows in self.table.rows_of_rank:
            passes = sorted((solver.value(start), row % 3, row) for row in rows for start in self.starts[row])
            found.append([(row // 3) << 2 | (F, I, W)[part] for _, part, row in passes])
        return found

    def _share_memory(self) -> None:
        """A forward allocates bytes; its input gradient frees some of them, its weight gradient the rest.

        An input gradient may also allocate, where more is held for the weight gradient than for the input gradient.
        """
        for stages, room in zip(self.table.problem.placement.stages, self.table.problem.room, strict=True):
            if room == inf:
                continue
            held, sizes = [], []
            for stage in stages:
                forward, first, second = range(3 * stage, 3 * stage + 3)
                kept, change, freed = (float(self.table.allocated[row]) for row in (forward, first, second))
                # (first row, last row, bytes): held from the start of a forward, or from the end of an input gradient,
                # to the end of the pass that frees them.
                spans = ((forward, first, -change), (forward, second, min(kept, -freed)), (first, second, change))
                for begin, end, size in spans:
                    for start, stop in self._pairs(begin, end) if int(size) > 0 else ():
                        length = self.model.new_int_var(0, self.horizon, "")
                        allocated = start if begin == forward else start + self.ticks[first]
                        held.append(self.model.new_interval_var(allocated, length, stop + self.ticks[end], ""))
                        sizes.append(int(size))
            self.model.add_cumulative(held, sizes, floor(room))

    def _send(self) -> None:
        """Messages of a link go one after another; one that does not occupy the link only arrives later."""
        links: dict[int, list[Any]] = {}
        for need in self.table.needs:
            for before, after in self._pairs(need.needed, need.row) if need.link >= 0 else ():
                made = before + self.ticks[need.needed]
                if occupied := self.whole(need.occupied):
                    sent = self.model.new_int_var(0, self.horizon, "")
                    self.model.add(sent >= made)
                    links.setdefault(need.link, []).append(self._fixed(sent, occupied))
                    made = sent + occupied
                self.model.add(after >= made + self.whole(need.latency))
        for intervals in links.values():
            self.model.add_no_overlap(intervals)

    def _fixed(self, start: Any, ticks: int) -> Any:
        return self.model.new_fixed_size_interval_var(start, ticks, "")

    def _pairs(self, first: int, second: int) -> Iterable[tuple[Any, Any]]:
        return zip(self.starts[first], self.starts[second], strict=True)
