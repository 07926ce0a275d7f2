"""Remedy: what a plan for slow ranks would take against the present one, and how to make it."""

from dataclasses import dataclass, replace

from penstock.ir import Plan, seconds_text
from penstock.passes import lower
from penstock.planner.measured import Measured
from penstock.planner.request import AUTO, Request
from penstock.planner.search import search
from penstock.planner.spreading import spread
from penstock.schedules import SCHEDULES
from penstock.simulate import simulate

BUDGET_SECONDS = 1.0
MAX_PASSES = 10_000
"""of a plan; for one with more the search would take too long"""
_WORTH = 0.02


@dataclass(frozen=True)
class Remedy:
    """Predicted seconds of a step on ranks of which some are slow."""

    present: float
    """by the plan that there is"""
    possible: float
    """by one that was searched for them"""
    call: str
    """how to make one"""

    @property
    def helps(self) -> bool:
        """Whether it is worth the trouble."""
        return self.possible <= (1 - _WORTH) * self.present

    def __str__(self) -> str:
        if not self.helps:
            return f"no plan was found that would help: a step takes about {seconds_text(self.present, 3)} with any"
        seconds = f"about {seconds_text(self.possible, 3)} instead of {seconds_text(self.present, 3)}"
        return f"a plan for that takes {seconds} a step: {self.call}"


def remedy(plan: Plan, slowness: tuple[float, ...], budget_seconds: float = BUDGET_SECONDS) -> Remedy | None:
    """Planned anew for ranks that slow; None for a plan too large to search in that time.

    A plan keeps no profile, so what a node costs is an estimate; what recomputed stages take is taken to stay with
    their nodes.
    """
    if len(plan.schedule.table.codes) > MAX_PASSES:
        return None
    cluster = replace(plan.cluster, slowness=slowness)
    present = simulate(lower(plan.schedule, cuts=plan.cuts), plan.costs_on(cluster), cluster).makespan
    profile = spread(plan, plan.costs_on(replace(plan.cluster, slowness=None)))
    models = {plan.num_microbatches: Measured(plan.graph, profile)}
    found = search(models, Request(cluster, _schedule(plan), budget_seconds=budget_seconds))
    return Remedy(present, found.predicted.makespan, call(plan, slowness))


def call(plan: Plan, slowness: tuple[float, ...]) -> str:
    """What to type to plan anew."""
    cluster, factors = plan.cluster, ",".join(f"{factor:g}" for factor in slowness)
    if cluster.links or cluster.replicas.count > 1:
        return f"penstock.plan(..., ranks=dataclasses.replace(plan.cluster, slowness=({factors})))"
    options = {
        "ranks": plan.num_ranks,
        "microbatches": plan.num_microbatches,
        "slowness": factors,
        "schedule": _schedule(plan) if _schedule(plan) != AUTO else None,
        "memory": min(cluster.limits, default=None),
        "recompute": "auto" if any(plan.choices.recompute) else None,
        "cores": cluster.cores,
        "latency": cluster.latency or None,
        "bandwidth": cluster.bandwidth,
    }
    words = [f"--{name} {value}" for name, value in options.items() if value is not None]
    return f"penstock plan MODEL {' '.join(words)} --out plan.json"


def _schedule(plan: Plan) -> str:
    """The name that was asked for; whatever was searched for, or given as an order, is searched for."""
    asked = dict(plan.search.asked).get("schedule", AUTO)
    return asked if asked in SCHEDULES else AUTO
