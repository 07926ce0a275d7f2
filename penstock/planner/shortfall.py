"""Shortfall: what is short when no plan fits, by how much, and which change would fit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.errors import FitError, PartitionError, PlanError, ScheduleError
from penstock.ir import Cluster, Plan, bytes_text
from penstock.planner.fitting import excess, shortage, worst_rank
from penstock.planner.measured import Models
from penstock.planner.orders import ordered
from penstock.planner.request import AUTO, Request
from penstock.planner.space import drafts

_MORE = (2, 4, 8, 16)
_MORE_RANKS = (2, 4)


def refusal(plans: Sequence[Plan], models: Models, request: Request) -> FitError:
    """The error for a request that nothing fulfils."""
    nearest = min(plans, key=excess)
    rank = worst_rank(nearest)
    hints = list(_ways_out(nearest, models, request))
    return FitError(
        f"no plan fits in memory: with {nearest.choices.schedule}, the nearest, {shortage(nearest)}",
        parameters_and_gradients=bytes_text(_state(nearest, rank)),
        activations=bytes_text(nearest.predicted.peaks[rank] - _state(nearest, rank)),
        hint="; or ".join(hints) if hints else "a smaller model, or ranks with more memory",
    )


def _ways_out(nearest: Plan, models: Models, request: Request) -> Iterator[str]:
    """Every single change that would fit, each tried."""
    if request.schedule != AUTO and _fits(models, replace(request, schedule=AUTO)):
        yield 'schedule="auto"'
    if request.recompute == "none" and _fits(models, replace(request, recompute="full")):
        yield 'recompute="auto"'
    if count := _microbatches(nearest):
        yield f"about microbatches={count}"
    if ranks := _ranks(models, request):
        yield f"ranks={ranks}"


def _microbatches(plan: Plan) -> int | None:
    """Smaller microbatches hold less, each in proportion."""
    for factor in _MORE:
        peaks = [
            _state(plan, rank) + (peak - _state(plan, rank)) / factor for rank, peak in enumerate(plan.predicted.peaks)
        ]
        if all(peak <= limit for peak, limit in zip(peaks, plan.cluster.limits, strict=True)):
            return plan.num_microbatches * factor
    return None


def _ranks(models: Models, request: Request) -> int | None:
    memory = min(request.cluster.limits)
    for factor in _MORE_RANKS:
        cluster = Cluster(request.cluster.ranks * factor, memory)
        if _fits(models, replace(request, cluster=cluster)):
            return cluster.ranks
    return None


def _fits(models: Models, request: Request) -> bool:
    """Whether some order of the table fits."""
    try:
        return any(excess(found.plan) <= 0 for draft in drafts(models, request) for found in ordered(draft, request))
    except (PartitionError, PlanError, ScheduleError):
        return False


def _state(plan: Plan, rank: int) -> int:
    return sum(plan.costs.state[stage].total for stage in plan.schedule.placement.stages[rank])
