"""MECHANISM: StageCosts + Placement + Cluster -> an order made for them, beside a bound that no order can undercut."""

from penstock.planner.synthesis.bound import Bound, lower_bound
from penstock.planner.synthesis.making import Synthesis, is_too_large, synthesise
from penstock.planner.synthesis.problem import Problem

__all__ = ["Bound", "Problem", "Synthesis", "is_too_large", "lower_bound", "synthesise"]
