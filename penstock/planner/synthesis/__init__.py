"""Synthesises an order for given costs, placement and cluster, with a bound that no order can undercut.

problem.py         ScheduleProblem, and passes as integers (pass ids)
pass_table.py      the same passes as rows of arrays, by stage and kind; their needs and seconds
evaluate.py        when each pass of given orders runs
bounds.py          lower bounds: paths, work and forced idle time, memory
greedy.py          many priority rules at once, each giving an order
evolve.py          improves the rules
local_search.py    improves single orders
exact.py           the optimum of small problems, by the solver CP-SAT
synthesise.py      `synthesise`, which combines them
"""

from penstock.planner.synthesis.bounds import Bound, lower_bound
from penstock.planner.synthesis.problem import ScheduleProblem
from penstock.planner.synthesis.synthesise import Synthesis, is_too_large, synthesise
