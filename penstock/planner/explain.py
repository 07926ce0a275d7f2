"""Explains why a plan was chosen, why others lost, and why no plan fits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from penstock.errors import FitError, PartitionError, PlanError, ScheduleError
from penstock.ir import Cluster, Plan, bytes_text, pass_seconds, percent_text, seconds_text
from penstock.planner.candidates import Models, excess_bytes, layouts, table_plans
from penstock.planner.options import AUTO, PlanOptions

_EQUAL = 1e-6
"""difference of two steps, as a share, that is not reported as slower"""
_NEAR = 0.05
"""how near, as a share, work and memory must be to the step and the limit to be reported as the limit"""
_NAMED = 8
"""cuts for which the cost of moves is reported"""
_VISIBLE = 5e-4
"""difference of two steps, as a share, that is reported as a percentage"""
_MORE_MICROBATCHES = (2, 4, 8, 16)
_MORE_RANKS = (2, 4)
"""factors that are tried if no plan fits"""


class Move(NamedTuple):
    """A node moved to the stage before or after its own, and the plan that results."""

    node: str
    source: int
    target: int
    plan: Plan


def reasons(plan: Plan, moves: Sequence[Move]) -> tuple[str, ...]:
    """Returns sentences: the busiest rank, the cost of moving a cut by one node, and the active limit."""
    predicted, work, (rank, most) = plan.predicted, work_seconds(plan), busiest(plan)
    mean = sum(work) / len(work)
    above = percent_text(most / mean - 1) if mean else percent_text(0)
    found = [f"Rank {rank} has the most work: {seconds_text(most)} of a step, {above} above the mean of the ranks."]

    # The effect of a move of one node over each cut, the cheapest first.
    by_cut: dict[int, list[Move]] = {}
    for move in moves:
        by_cut.setdefault(min(move.source, move.target), []).append(move)
    cheapest = sorted(by_cut.items(), key=lambda entry: min(move.plan.predicted.makespan for move in entry[1]))
    for stage, over_cut in cheapest[:_NAMED]:
        effects = ", ".join(_effect(plan, move) for move in over_cut)
        found.append(f"Cut between stages {stage} and {stage + 1}: {effects}.")
    if len(cheapest) > _NAMED:
        found.append(f"Moves over the other {len(cheapest) - _NAMED} cuts cost more.")

    gap = percent_text(1 - predicted.lower_bound / predicted.makespan) if predicted.makespan else percent_text(0)
    limit = "Filling and draining the pipeline is the limit"
    if most >= (1 - _NEAR) * predicted.makespan:
        limit = f"The work of rank {rank} is the limit"
    if plan.cluster.limits:
        fullest = _worst_rank(plan)
        peak, memory = predicted.peaks[fullest], plan.cluster.limits[fullest]
        if peak >= (1 - _NEAR) * memory:
            limit = f"Memory is the limit: rank {fullest} holds {bytes_text(peak)} of {bytes_text(memory)}"
    return (*found, f"{limit}; no order of these stages can be more than {gap} shorter.")


def _effect(plan: Plan, move: Move) -> str:
    longer = move.plan.predicted.makespan / plan.predicted.makespan - 1 if plan.predicted.makespan else 0.0
    effect = f"a step {percent_text(longer)} longer" if longer >= _VISIBLE else "the same step time"
    if (short := excess_bytes(move.plan)) > 0:
        effect += f" and {bytes_text(short)} more than fit in memory"
    return f"{move.node!r} in stage {move.target} would mean {effect}"


def why_lost(plan: Plan, best: Plan) -> str:
    """Returns one sentence on why a plan is worse than the best."""
    if excess_bytes(plan) > 0:
        return _shortage(plan)
    ours, theirs = plan.predicted, best.predicted
    slower = ours.makespan / theirs.makespan - 1 if theirs.makespan else 0.0
    if slower <= _EQUAL:
        return "as fast, but needs more memory" if max(ours.peaks) > max(theirs.peaks) else "as fast"
    rank, work = busiest(plan)
    least = busiest(best)[1]
    if work - least >= (ours.makespan - theirs.makespan) / 2:
        more = percent_text(work / least - 1)
        return f"{percent_text(slower)} slower: rank {rank} works {more} longer than the busiest of the chosen plan"
    bubbles = f"{percent_text(ours.bubble)} against {percent_text(theirs.bubble)}"
    return f"{percent_text(slower)} slower: its ranks wait longer (bubble {bubbles})"


def work_seconds(plan: Plan) -> list[float]:
    """Returns the seconds of compute per rank in a step, with backwards whole or split as the order has them."""
    table = plan.schedule.table
    seconds = pass_seconds(table, plan.costs, plan.cluster.overlap)
    return [float(each) for each in np.bincount(table.rank_of, seconds, minlength=plan.num_ranks)]


def busiest(plan: Plan) -> tuple[int, float]:
    """Returns the rank with the most work in a step, and its seconds."""
    work = work_seconds(plan)
    return work.index(max(work)), max(work)


def no_fit_error(plans: Sequence[Plan], models: Models, options: PlanOptions) -> FitError:
    """Returns the error for options that no plan fits: the shortage, and changes that would fit."""
    nearest = min(plans, key=excess_bytes)
    rank = _worst_rank(nearest)
    hints = list(_ways_out(nearest, models, options))
    return FitError(
        f"no plan fits in memory: with {nearest.choices.schedule}, the nearest, {_shortage(nearest)}",
        parameters_gradients_and_optimizer=bytes_text(_state_bytes(nearest, rank)),
        activations=bytes_text(nearest.predicted.peaks[rank] - _state_bytes(nearest, rank)),
        hint="; or ".join(hints) if hints else "a smaller model, or ranks with more memory",
    )


def _ways_out(nearest: Plan, models: Models, options: PlanOptions) -> Iterator[str]:
    """Changes that would fit, one at a time: schedules, recomputation and ranks are tried, microbatches estimated."""
    if options.schedule != AUTO and _fits(models, options, schedule=AUTO):
        yield 'schedule="auto"'
    if options.recompute == "none" and _fits(models, options, recompute="full"):
        yield 'recompute="auto"'
    for factor in _MORE_MICROBATCHES:
        # Smaller microbatches hold less, each in proportion.
        states = [_state_bytes(nearest, rank) for rank in range(nearest.num_ranks)]
        pairs = zip(states, nearest.predicted.peaks, nearest.cluster.limits, strict=True)
        if all(state + (peak - state) / factor <= limit for state, peak, limit in pairs):
            yield f"about microbatches={nearest.num_microbatches * factor}"
            break
    for factor in _MORE_RANKS:
        cluster = Cluster(options.cluster.ranks * factor, min(options.cluster.limits))
        if _fits(models, options, ranks=cluster, memory=None):
            yield f"ranks={cluster.ranks}"
            break


def _fits(models: Models, options: PlanOptions, **changes: Any) -> bool:
    """Whether some schedule of the table fits with these options changed; False if they do not fit together."""
    try:
        options = replace(options, **changes)
        return any(
            excess_bytes(found.plan) <= 0
            for layout in layouts(models, options)
            for found in table_plans(layout, options)
        )
    except (PartitionError, PlanError, ScheduleError):
        return False


def _worst_rank(plan: Plan) -> int:
    """The rank that is closest to its limit, or farthest above it."""
    over = [peak - limit for peak, limit in zip(plan.predicted.peaks, plan.cluster.limits, strict=True)]
    return over.index(max(over))


def _shortage(plan: Plan) -> str:
    rank = _worst_rank(plan)
    peak, limit = plan.predicted.peaks[rank], plan.cluster.limits[rank]
    return f"rank {rank} lacks {bytes_text(peak - limit)}: it would hold {bytes_text(peak)} of {bytes_text(limit)}"


def _state_bytes(plan: Plan, rank: int) -> int:
    return sum(plan.costs.state[stage].total for stage in plan.schedule.placement.stages[rank])
