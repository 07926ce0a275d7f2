"""pipedream: runs of the model's order, even in the longer of computing and of moving what crosses the cuts.

Choose it when links are slow: it knows the bandwidth of every link of the Cluster and all values that a stage receives,
skips among them, and cuts where few bytes cross. Without bandwidth it is linear. It is exact for one stage per rank up
to 1,000 nodes, above which nodes are joined. The idea is that of PipeDream (Harlap et al., 2018), which looked at the
value of one node per cut.
"""

from dataclasses import dataclass

from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.search.bill import Rates
from penstock.partitioners.search.cutting import cut
from penstock.partitioners.search.outcome import division


@dataclass(frozen=True)
class PipeDream(Partitioner):
    """Seconds count, and so do messages."""

    name = "pipedream"

    def divide(self, problem: Problem) -> Division:
        found = cut(problem, problem.atoms, Rates.of(problem))
        why = "runs of the model's order, even in the longer of computing and of messages"
        return division(problem, found.stage, why, bounds=(0.0, found.bound))
