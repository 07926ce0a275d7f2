"""Reasons: why these cuts and this order, what moving a cut by one node would cost, and which limit is active."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.ir import Plan, bytes_text, percent_text, seconds_text
from penstock.planner.fitting import excess, worst_rank
from penstock.planner.neighbours import Neighbour
from penstock.planner.verdict import busiest, work_seconds

_NEAR = 0.05
_NAMED = 8
_TELLABLE = 5e-4


class Moved(NamedTuple):
    """A node moved over a cut, and the plan that this gives."""

    neighbour: Neighbour
    plan: Plan


def reasons(plan: Plan, moved: Sequence[Moved]) -> tuple[str, ...]:
    """A sentence each."""
    return (*_balance(plan), *_cuts(plan, moved), _limit(plan))


def _balance(plan: Plan) -> Iterator[str]:
    work = work_seconds(plan)
    rank, most = busiest(plan)
    mean = sum(work) / len(work)
    above = percent_text(most / mean - 1) if mean else percent_text(0)
    yield f"Rank {rank} works most: {seconds_text(most)} of a step, {above} above the mean of the ranks."


def _cuts(plan: Plan, moved: Sequence[Moved]) -> Iterator[str]:
    """What a move of one node over each cut would cost, the cuts first that lose the least."""
    by_cut: dict[int, list[Moved]] = {}
    for change in moved:
        by_cut.setdefault(min(change.neighbour.source, change.neighbour.target), []).append(change)
    told = sorted(by_cut.items(), key=lambda entry: min(_seconds(change) for change in entry[1]))
    for stage, changes in told[:_NAMED]:
        effects = ", ".join(_effect(plan, change) for change in changes)
        yield f"Cut between stages {stage} and {stage + 1}: {effects}."
    if len(told) > _NAMED:
        yield f"Moves over the other {len(told) - _NAMED} cuts cost more."


def _effect(plan: Plan, change: Moved) -> str:
    longer = _seconds(change) / plan.predicted.makespan - 1 if plan.predicted.makespan else 0.0
    effect = f"a step {percent_text(longer)} longer" if longer >= _TELLABLE else "no longer step"
    if (short := excess(change.plan)) > 0:
        effect += f" and {bytes_text(short)} too much held"
    return f"{change.neighbour.node!r} in stage {change.neighbour.target} would mean {effect}"


def _seconds(change: Moved) -> float:
    return change.plan.predicted.makespan


def _limit(plan: Plan) -> str:
    seen = plan.predicted
    gap = percent_text(1 - seen.lower_bound / seen.makespan) if seen.makespan else percent_text(0)
    proof = f"no order of these stages can be more than {gap} shorter"
    if plan.cluster.limits:
        rank = worst_rank(plan)
        peak, limit = seen.peaks[rank], plan.cluster.limits[rank]
        if peak >= (1 - _NEAR) * limit:
            return f"Memory is the limit: rank {rank} holds {bytes_text(peak)} of {bytes_text(limit)}; {proof}."
    rank, most = busiest(plan)
    if most >= (1 - _NEAR) * seen.makespan:
        return f"The work of rank {rank} is the limit; {proof}."
    return f"Filling and draining the pipeline is the limit; {proof}."
