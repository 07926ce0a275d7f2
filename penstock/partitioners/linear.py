"""linear: runs of the model's order, so that the busiest rank has as little to compute as any such cut allows.

Choose it when links are fast compared with the blocks, or when a cut is wanted at once: 10,000 nodes take milliseconds.
It is exact for one stage per rank. With several stages per rank it evens out their sums under the placement: exact for
two in a loop or a vee up to a few hundred nodes, close to it beyond. Among equally good cuts it takes the one that
costs the fewest bytes: those that cross, and those of tied parameters that several ranks would hold.
"""

from dataclasses import dataclass

from penstock.errors import PartitionError
from penstock.ir import is_finite
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.search.bill import Rates
from penstock.partitioners.search.cutting import cut
from penstock.partitioners.search.outcome import division


@dataclass(frozen=True)
class Linear(Partitioner):
    """Seconds count, messages do not."""

    name = "linear"
    slack: float = 0.0
    """how much more the busiest rank may have to do than it must, as a share of it, if fewer bytes cross then"""

    def __post_init__(self) -> None:
        if not is_finite(self.slack) or self.slack < 0:
            raise PartitionError("slack is a share, 0 or more", slack=repr(self.slack))

    def divide(self, problem: Problem) -> Division:
        found = cut(problem, problem.atoms, Rates.of(problem).without_messages, slack=self.slack)
        return division(problem, found.stage, "runs of the model's order, even in seconds", bounds=(0.0, found.bound))
