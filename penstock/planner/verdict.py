"""Verdict: why a plan lost to another, in words."""

from penstock.ir.plan import Plan
from penstock.ir.units import percent_text
from penstock.planner.fitting import excess, shortage

_ALIKE = 1e-6


def why_lost(plan: Plan, best: Plan) -> str:
    """One sentence."""
    if excess(plan) > 0:
        return shortage(plan)
    ours, theirs = plan.predicted, best.predicted
    slower = ours.makespan / theirs.makespan - 1 if theirs.makespan else 0.0
    if slower <= _ALIKE:
        return "as fast, and holds more" if max(ours.peaks) > max(theirs.peaks) else "as fast"
    work, least = busiest(plan), busiest(best)
    if work[1] - least[1] >= (ours.makespan - theirs.makespan) / 2:
        more = percent_text(work[1] / least[1] - 1)
        return f"{percent_text(slower)} slower: rank {work[0]} works {more} longer than the busiest of the chosen plan"
    bubbles = f"{percent_text(ours.bubble)} against {percent_text(theirs.bubble)}"
    return f"{percent_text(slower)} slower: its ranks wait longer (bubble {bubbles})"


def work_seconds(plan: Plan) -> list[float]:
    """Seconds of compute per rank in a step."""
    costs = plan.costs
    each = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
    return [plan.num_microbatches * sum(each[stage] for stage in stages) for stages in plan.schedule.placement.stages]


def busiest(plan: Plan) -> tuple[int, float]:
    """The rank with the most work in a step, and its seconds."""
    work = work_seconds(plan)
    return work.index(max(work)), max(work)
