"""Cuts the model's order into runs with the least possible compute on the busiest rank.

Choose it when links are fast compared with the blocks, or when a cut is wanted at once: 10,000 nodes take milliseconds.
It is exact for one stage per rank. With several stages per rank it evens out their sums under the placement: exact for
two in a loop or a vee up to a few hundred nodes, close to it beyond. Among equally good cuts it takes the one that
costs the fewest bytes: those that cross, and those of tied parameters that several ranks would hold.
"""

from dataclasses import dataclass

from penstock.errors import PartitionError
from penstock.ir import is_finite
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.costs import CostRates
from penstock.partitioners.score import division
from penstock.partitioners.search.contiguous import cut_runs


@dataclass(frozen=True)
class Linear(Partitioner):
    """Balances seconds and ignores the time of messages."""

    name = "linear"
    is_fast = True
    slack: float = 0.0
    """how much more the busiest rank may compute than necessary, as a share, if fewer bytes cross then"""

    def __post_init__(self) -> None:
        if not is_finite(self.slack) or self.slack < 0:
            raise PartitionError("slack must be a share, 0 or more", slack=repr(self.slack))

    def divide(self, problem: Problem) -> Division:
        found = cut_runs(problem, problem.atoms, CostRates.of(problem).without_messages, slack=self.slack)
        why = "runs of the model's order, even in seconds"
        return division(problem, found.stage, why, contiguous_bound=found.bound)
