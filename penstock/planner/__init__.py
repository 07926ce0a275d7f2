"""The planner: chooses cuts, placement, order, microbatches and recomputation, and synthesises schedules."""

from typing import Any

from penstock.ir import Cluster
from penstock.planner.candidates import Measured
from penstock.planner.options import AUTO, PlanOptions
from penstock.planner.plan_search import search
from penstock.planner.resize import interpolate_profile, unsplit, with_microbatches
from penstock.planner.slow_ranks import SlowRankAdvisor
from penstock.planner.synthesis import ScheduleProblem, is_too_large, synthesise

__all__ = [
    "AUTO",
    "Measured",
    "PlanOptions",
    "Request",
    "ScheduleProblem",
    "SlowRankAdvisor",
    "interpolate_profile",
    "is_too_large",
    "search",
    "synthesise",
    "unsplit",
    "with_microbatches",
]


def Request(cluster: Cluster, *args: Any, **options: Any) -> PlanOptions:  # noqa: N802
    """Returns PlanOptions from the arguments of the record that it replaces."""
    names = ("schedule", "partitioner", "stages_per_rank", "recompute", "budget_seconds")
    return PlanOptions(ranks=cluster, **dict(zip(names, args, strict=False)), **options)
