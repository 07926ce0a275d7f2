"""Synthesises an order for given costs, placement and cluster, with a bound that no order can undercut."""

from penstock.planner.synthesis.bounds import Bound, lower_bound
from penstock.planner.synthesis.orders import Synthesis, is_too_large, synthesise
from penstock.planner.synthesis.problem import ScheduleProblem
