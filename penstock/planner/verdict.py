"""Verdict: why a plan lost to another, in words."""

import numpy as np

from penstock.ir import Plan, pass_seconds, percent_text
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
    """Seconds of compute per rank in a step, of backwards that are whole or split as the order has them."""
    table = plan.schedule.table
    seconds = pass_seconds(table, plan.costs, plan.cluster.overlap)
    return [float(each) for each in np.bincount(table.rank_of, seconds, minlength=plan.num_ranks)]


def busiest(plan: Plan) -> tuple[int, float]:
    """The rank with the most work in a step, and its seconds."""
    work = work_seconds(plan)
    return work.index(max(work)), max(work)
