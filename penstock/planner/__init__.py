"""Chooses cuts, placement, order, microbatches and recomputation, and synthesises schedules."""

from penstock.planner.candidates import Measured
from penstock.planner.options import AUTO, PlanOptions
from penstock.planner.plan_search import search
from penstock.planner.resize import interpolate_profile, with_microbatches
from penstock.planner.slow_ranks import SlowRankAdvisor
from penstock.planner.synthesis import ScheduleProblem, is_too_large, synthesise

__all__ = [
    "AUTO",
    "Measured",
    "PlanOptions",
    "ScheduleProblem",
    "SlowRankAdvisor",
    "interpolate_profile",
    "is_too_large",
    "search",
    "synthesise",
    "with_microbatches",
]
