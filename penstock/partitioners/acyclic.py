"""Searches all partitions in which values go forward only, not just runs of the model's order.

Choose it when the model has branches, or when the best cut into runs is uneven and a few nodes beside the main path
could move. Where the model has few branches (at most `ideals` prefixes), all partitions are compared, and the result is
proven to be optimal. Else, and with several stages per rank, it improves cuts of several orders by moving single nodes,
first joined to larger atoms and then taken apart (multilevel).
"""

from dataclasses import dataclass

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import is_count
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.costs import CostRates
from penstock.partitioners.score import Score, division, lower_bound
from penstock.partitioners.search.contiguous import Chains, cut_runs
from penstock.partitioners.search.ideals import all_ideals, ideal_levels
from penstock.partitioners.search.limits import round_up
from penstock.partitioners.search.local import improve
from penstock.partitioners.search.multilevel import join_idle_atoms, search_partitions

_CLOSE = 1.001
"""times the lower bound, up to which no search is begun"""


@dataclass(frozen=True)
class Acyclic(Partitioner):
    """Compares all partitions where they are few, else searches; never worse than linear and pipedream."""

    name = "acyclic"
    supports_mixed = False
    ideals: int = 2000
    """prefixes of the model up to which all partitions are compared"""
    attempts: int = 4
    """orders of the atoms that are cut, before and again after local search"""

    def __post_init__(self) -> None:
        for option in ("ideals", "attempts"):
            if not is_count(getattr(self, option)):
                raise PartitionError(f"{option} must be a whole number, 1 or more", got=repr(getattr(self, option)))

    def divide(self, problem: Problem) -> Division:
        rates = CostRates.of(problem)
        runs = cut_runs(problem, problem.atoms, rates)
        start, bound = Score(problem, problem.atoms, runs.stage), 0.0
        exact = self._exact(problem, rates) if problem.is_single else None
        if exact:
            found, bound = exact
            why = "all partitions compared" if bound else "all partitions compared, nodes that take no time aside"
        elif (found := improve(start)).key.excess == 0 and found.key.busiest <= _CLOSE * lower_bound(problem):
            why = "nodes moved between runs of the model's order, which were even already"
        else:
            found = min(found, search_partitions(problem, self.attempts))
            why = "nodes moved between the stages of the best of several cuts"
        return division(problem, min(start, found).stage, why, bound=bound, contiguous_bound=runs.bound)

    def _exact(self, problem: Problem, rates: CostRates) -> tuple[Score, float] | None:
        """The best chain of ideals, and a lower bound of the load of any partition; 0 if none is proven."""
        single, joined = np.arange(len(problem.atoms)), join_idle_atoms(problem.atoms, problem.num_stages)
        # Atoms without seconds can be joined to others without loss, unless bytes count.
        is_lossless = not (rates.has_messages or rates.has_limits)
        for group in (joined,) if is_lossless else (single, joined):
            inside = all_ideals(atoms := problem.atoms.merged(group), self.ideals)
            if inside is None:
                continue
            chains = Chains(ideal_levels(atoms, inside, not rates.overlaps), problem.num_stages, len(inside))
            least = chains.least_load(rates.loads)
            if np.isinf(least):
                continue
            chain = chains.fewest_bytes(rates.loads, round_up(least))
            # An atom is in the stage that ends with the first ideal that contains it.
            stage = inside[chain[1:]].argmax(axis=0)
            # Links that differ are distinguished by Score only.
            is_proof = is_lossless or (len(atoms) == len(problem.atoms) and not problem.cluster.links)
            return improve(Score(problem, problem.atoms, stage[group])), least if is_proof else 0.0
        return None
