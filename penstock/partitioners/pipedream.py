"""Cuts the model's order into runs that are even in the longer of compute and messages.

Choose it when links are slow: it takes into account the bandwidth of every link of the Cluster and all values that a
stage receives, skip connections included, and cuts where few bytes cross. Without bandwidth it equals linear. It is
exact for one stage per rank up to 1,000 nodes, above which nodes are joined. The idea is that of PipeDream (Harlap et
al., 2018), which considered the value of one node per cut.
"""

from dataclasses import dataclass

from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.costs import CostRates
from penstock.partitioners.score import division
from penstock.partitioners.search.contiguous import cut_runs


@dataclass(frozen=True)
class PipeDream(Partitioner):
    """Balances seconds of compute and of messages."""

    name = "pipedream"
    is_for_slow_links = True

    def divide(self, problem: Problem) -> Division:
        found = cut_runs(problem, problem.atoms, CostRates.of(problem))
        why = "runs of the model's order, even in the longer of computing and of messages"
        return division(problem, found.stage, why, contiguous_bound=found.bound)
