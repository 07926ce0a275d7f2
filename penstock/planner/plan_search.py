"""Searches for the best plan that the options allow, over cuts, placements, orders, microbatches and recomputation."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from penstock.errors import FitError, PartitionError, ScheduleError
from penstock.ir import Candidate, Graph, Partition, Plan, Search
from penstock.planner.candidates import (
    LayoutPlan,
    Models,
    StageLayout,
    excess_bytes,
    layouts,
    other_layouts,
    synthesised_plan,
    table_plans,
)
from penstock.planner.explain import Move, no_fit_error, reasons, why_lost
from penstock.planner.options import AUTO, PlanOptions
from penstock.planner.synthesis import is_too_large

OnProgress = Callable[[int, int], None]
"""is called with the time spent and the whole time, in milliseconds"""
_CLOSE_ENOUGH = 1.002
"""a step this near to its bound is not improved further"""
_MOST_CANDIDATES = 12
"""candidates that a plan lists"""
_MOST_SYNTHESISED = 4
"""layouts for which an order is synthesised"""


def search(models: Models, options: PlanOptions, on_progress: OnProgress | None = None) -> Plan:
    """Returns the plan with the shortest predicted step that fits; its `search` lists the other candidates.

    The search ends after about `options.budget_seconds`; a candidate that is being evaluated is finished. Raises
    FitError if no plan fits in memory.
    """
    return _Search(models, options, on_progress).best()


class _Search:
    """One call of `search`: the plans found so far, and the time that is left."""

    def __init__(self, models: Models, options: PlanOptions, on_progress: OnProgress | None) -> None:
        self._models, self._options, self._on_progress = models, options, on_progress
        self._end = time.monotonic() + options.budget_seconds
        self._found: list[LayoutPlan] = []
        self._without_schedule: list[StageLayout] = []
        """layouts for whose placement the table has no schedule: an order may still be synthesised for them"""
        self._refusal: ScheduleError | None = None
        """why no order fits, for the first layout for which none was synthesised"""

    def best(self) -> Plan:
        """Tries orders of the table first, then orders made for the most promising layouts, then moves of nodes."""
        for layout in sorted(layouts(self._models, self._options), key=lambda layout: layout.bound):
            self._try_table(layout)
        if self._fitting and self._seconds_left:
            # Other partitioners for the best placement so far.
            best = self._winner
            if best.layout.bound * _CLOSE_ENOUGH < best.plan.predicted.makespan:
                for layout in other_layouts(best.layout, self._options):
                    self._try_table(layout)
        if self._options.schedule == AUTO:
            self._synthesise()
        if not self._found and self._refusal is not None:
            # Only synthesis has orders for the placement, and none fits: report why it was refused.
            error = self._refusal
            raise FitError(error.problem, hint=error.hint, **error.values)
        if not self._fitting:
            raise no_fit_error([found.plan for found in self._found], self._models, self._options)
        moves = self._improve_cuts()
        chosen = self._winner.plan
        # The others from best to worst; those with equal results are listed once.
        candidates, seen = [_candidate(chosen, "")], {_results(chosen)}
        for plan in sorted((found.plan for found in self._found if found.plan is not chosen), key=_sort_key):
            if _results(plan) not in seen and len(seen) < _MOST_CANDIDATES:
                seen.add(_results(plan))
                candidates.append(_candidate(plan, why_lost(plan, chosen)))
        asked = self._options.as_text(self._models)
        return replace(chosen, search=Search(tuple(candidates), reasons(chosen, moves), asked))

    @property
    def _seconds_left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def _fitting(self) -> list[LayoutPlan]:
        """The plans that keep within memory."""
        return [found for found in self._found if excess_bytes(found.plan) <= 0]

    @property
    def _winner(self) -> LayoutPlan:
        return min(self._fitting, key=lambda found: _sort_key(found.plan))

    def _report(self) -> None:
        if self._on_progress is not None:
            whole = self._options.budget_seconds
            self._on_progress(round(1000 * (whole - self._seconds_left)), round(1000 * whole))

    def _should_skip(self, bound: float) -> bool:
        """Whether a layout with this lower bound cannot become the best plan, or the budget is used up."""
        return bool(self._fitting) and (not self._seconds_left or bound >= self._winner.plan.predicted.makespan)

    def _try_table(self, layout: StageLayout) -> None:
        """All orders of the table, with as much recomputation as memory demands."""
        if self._should_skip(layout.bound):
            return
        self._report()
        before = len(self._found)
        for found in table_plans(layout, self._options):
            self._found.append(found)
            if not self._seconds_left and self._fitting:
                return
        if len(self._found) == before:
            self._without_schedule.append(layout.recomputing() if self._options.recompute == "full" else layout)

    def _synthesise(self) -> None:
        """Orders made for the layouts that may still become the best, the most promising first."""
        known = {id(found.layout): found.layout for found in self._found}
        chosen = sorted((*known.values(), *self._without_schedule), key=lambda layout: layout.bound)
        chosen = chosen[:_MOST_SYNTHESISED]
        for place, layout in enumerate(chosen):
            if self._should_skip(layout.bound * _CLOSE_ENOUGH):
                return
            self._report()
            # One share is left over after the last layout, for moves of nodes.
            share = self._seconds_left / (len(chosen) - place + 1)
            if self._fitting and is_too_large(layout.problem, share):
                continue  # only the table is left, and that has been tried
            try:
                self._found.append(synthesised_plan(layout, share))
            except ScheduleError as error:
                self._refusal = self._refusal or error
                if self._options.recompute == AUTO and not any(layout.choices.recompute):
                    with suppress(ScheduleError):
                        self._found.append(synthesised_plan(layout.recomputing(), share))

    def _improve_cuts(self) -> list[Move]:
        """Moves nodes over cuts as long as that helps; returns the last moves, which do not help."""
        while True:
            self._report()
            plan, layout = self._winner
            moved = list(self._moves(plan, layout))
            shorter = plan.predicted.makespan * (1 - 1e-9)
            better = [
                (move, cut)
                for move, cut in moved
                if excess_bytes(move.plan) <= 0 and move.plan.predicted.makespan < shorter
            ]
            if not better or self._options.partitioner != AUTO or not self._seconds_left:
                return [move for move, _ in moved]
            move, cut = min(better, key=lambda pair: pair[0].plan.predicted.makespan)
            self._found.append(LayoutPlan(move.plan, cut))

    def _moves(self, plan: Plan, layout: StageLayout) -> Iterator[tuple[Move, StageLayout]]:
        """Every move of one node, with the same order; at least one, even if there is no time."""
        for nth, (partition, node, source, target) in enumerate(node_moves(plan.graph, plan.partition)):
            if nth and not self._seconds_left:
                break
            cut = replace(layout, partition=partition)
            # Other cuts may have other edges between stages: the messages of a given program may not fit them, and an
            # order made for branches may deadlock.
            with suppress(ScheduleError):
                yield Move(node, source, target, cut.plan(plan.orders, plan.choices.schedule)), cut


def node_moves(graph: Graph, partition: Partition) -> Iterator[tuple[Partition, str, int, int]]:
    """Yields every legal move of one node over the cut to the stage before or after its own.

    Each is the partition after the move, the node, its old and its new stage. Nodes that depend on inputs only run
    wherever they are needed, so that moving them has no effect.
    """
    order = {node.name: place for place, node in enumerate(graph.nodes) if not node.from_inputs}
    for stage in range(partition.num_stages - 1):
        here, there = (
            sorted((name for name in partition.stages[each] if name in order), key=order.__getitem__)
            for each in (stage, stage + 1)
        )
        ways = [(name, stage, stage + 1) for name in here[-1:]] + [(name, stage + 1, stage) for name in there[:1]]
        for node, source, target in ways:
            stages = [list(names) for names in partition.stages]
            stages[source].remove(node)
            stages[target].append(node)
            try:
                moved = Partition(tuple(map(tuple, stages)))
                moved.check(graph)
            except PartitionError:
                continue
            yield moved, node, source, target


def _sort_key(plan: Plan) -> tuple[bool, float, int]:
    return excess_bytes(plan) > 0, plan.predicted.makespan, max(plan.predicted.peaks)


def _results(plan: Plan) -> tuple[object, ...]:
    """Equal for plans that a user could not tell apart by their sizes and predictions."""
    predicted = plan.predicted
    return plan.num_microbatches, plan.num_stages, f"{predicted.makespan:.9g}", predicted.peaks


def _candidate(plan: Plan, lost: str) -> Candidate:
    ranks = plan.schedule.placement.ranks
    edges = (*plan.cuts.edges, *plan.cuts.gradient_edges)
    num_messages = plan.num_microbatches * sum(ranks[producer] != ranks[consumer] for producer, consumer in edges)
    return Candidate(plan.choices, plan.num_microbatches, num_messages, plan.predicted, lost)
