"""search: the best plan that a request allows, over cuts, placements, orders, microbatches and recomputation."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from penstock.ir import Candidate, Plan, Search
from penstock.planner.budget import Budget
from penstock.planner.draft import Draft
from penstock.planner.fitting import excess
from penstock.planner.measured import Models
from penstock.planner.neighbours import neighbours
from penstock.planner.orders import Found, ordered, synthesised
from penstock.planner.reasons import Moved, reasons
from penstock.planner.request import AUTO, Request
from penstock.planner.shortfall import refusal
from penstock.planner.space import drafts, further
from penstock.planner.synthesis import is_too_large
from penstock.planner.verdict import why_lost

Tell = Callable[[int, int], None]
"""is told how much of how much time is spent, in thousandths of a second"""
_CLOSE_ENOUGH = 1.002
"""a step this near to its bound is not improved further"""
_MOST_CANDIDATES = 12
_MOST_SYNTHESISED = 4


def silent(done: int, total: int) -> None:
    """For those who need not know."""


def search(models: Models, request: Request, tell: Tell = silent) -> Plan:
    """The plan of the shortest predicted step that fits; its `search` says what else was looked at."""
    return _Searching(models, request, tell).best()


class _Searching:
    def __init__(self, models: Models, request: Request, tell: Tell) -> None:
        self._models, self._request, self._tell = models, request, tell
        self._budget = Budget(request.budget_seconds)
        self._found: list[Found] = []
        self._unordered: list[Draft] = []

    def best(self) -> Plan:
        """Orders of the table first, then orders made for the most promising drafts, then the cuts by one node."""
        for draft in sorted(drafts(self._models, self._request), key=lambda draft: draft.bound):
            self._look_at(draft)
        self._cut_otherwise()
        if self._request.schedule == AUTO:
            self._synthesise()
        if not self._fitting:
            raise refusal([found.plan for found in self._found], self._models, self._request)
        moved = self._improve_cuts()
        chosen = self._winner.plan
        asked = self._request.words(self._models)
        return replace(chosen, search=Search(tuple(self._ranked(chosen)), reasons(chosen, moved), asked))

    @property
    def _fitting(self) -> list[Found]:
        return [found for found in self._found if excess(found.plan) <= 0]

    @property
    def _winner(self) -> Found:
        return min(self._fitting, key=lambda found: _rank(found.plan))

    def _is_hopeless(self, bound: float) -> bool:
        """Whether nothing better can come of a draft with that bound, or there is no time to see."""
        return bool(self._fitting) and (self._budget.is_spent or bound >= self._winner.plan.predicted.makespan)

    def _look_at(self, draft: Draft) -> None:
        """All orders of the table, with as much recomputation as memory demands."""
        if self._is_hopeless(draft.bound):
            return
        self._budget.tell(self._tell)
        before = len(self._found)
        for found in ordered(draft, self._request):
            self._found.append(found)
            if self._budget.is_spent and self._fitting:
                return
        if len(self._found) == before:
            # The table has no schedule for stages that lie like this.
            self._unordered.append(draft)

    def _cut_otherwise(self) -> None:
        """Other ways to cut for the best placement so far."""
        if self._fitting and not self._budget.is_spent:
            best = self._winner
            if best.draft.bound * _CLOSE_ENOUGH < best.plan.predicted.makespan:
                for draft in further(best.draft, self._request):
                    self._look_at(draft)

    def _synthesise(self) -> None:
        """Make orders for the drafts that may still become the best, the most promising first."""
        known = {id(found.draft): found.draft for found in self._found}
        chosen = sorted((*known.values(), *self._unordered), key=lambda draft: draft.bound)[:_MOST_SYNTHESISED]
        for place, draft in enumerate(chosen):
            if self._is_hopeless(draft.bound * _CLOSE_ENOUGH):
                return
            self._budget.tell(self._tell)
            # What is left after the last one is for the cuts.
            share = self._budget.left / (len(chosen) - place + 1)
            if self._fitting and is_too_large(draft.problem, share):
                continue  # all that is left is the table, and that has been looked at
            self._found += synthesised(draft, share)

    def _improve_cuts(self) -> list[Moved]:
        """Move nodes over cuts as long as that helps; returns what the last moves, which do not, would cost."""
        while True:
            self._budget.tell(self._tell)
            plan, draft = self._winner
            moved = self._moved(plan, draft)
            better = [(change, cut) for change, cut in moved if _is_better(change.plan, plan)]
            if not better or self._request.partitioner != AUTO or self._budget.is_spent:
                return [change for change, _ in moved]
            change, cut = min(better, key=lambda pair: pair[0].plan.predicted.makespan)
            self._found.append(Found(change.plan, cut))

    def _moved(self, plan: Plan, draft: Draft) -> list[tuple[Moved, Draft]]:
        """Every move of one node, with the same order."""
        found: list[tuple[Moved, Draft]] = []
        for neighbour in neighbours(plan.graph, plan.partition):
            if self._budget.is_spent and found:
                break
            cut = draft.cut_as(neighbour.partition)
            found.append((Moved(neighbour, cut.plan(plan.schedule, plan.choices.schedule)), cut))
        return found

    def _ranked(self, chosen: Plan) -> Iterable[Candidate]:
        """The chosen plan and the others from the best to the worst; what comes to the same is told once."""
        others = sorted((found.plan for found in self._found if found.plan is not chosen), key=_rank)
        seen = {_figures(chosen)}
        yield _candidate(chosen, "")
        for plan in others:
            if _figures(plan) not in seen and len(seen) < _MOST_CANDIDATES:
                seen.add(_figures(plan))
                yield _candidate(plan, why_lost(plan, chosen))


def _is_better(plan: Plan, other: Plan) -> bool:
    return excess(plan) <= 0 and plan.predicted.makespan < other.predicted.makespan * (1 - 1e-9)


def _rank(plan: Plan) -> tuple[bool, float, int]:
    return excess(plan) > 0, plan.predicted.makespan, max(plan.predicted.peaks)


def _figures(plan: Plan) -> tuple[object, ...]:
    seen = plan.predicted
    return plan.num_microbatches, plan.num_stages, f"{seen.makespan:.9g}", seen.peaks


def _candidate(plan: Plan, lost: str) -> Candidate:
    ranks = plan.schedule.placement.ranks
    edges = (*plan.cuts.edges, *plan.cuts.gradient_edges)
    num_messages = plan.num_microbatches * sum(ranks[producer] != ranks[consumer] for producer, consumer in edges)
    return Candidate(plan.choices, plan.num_microbatches, num_messages, plan.predicted, lost)
