"""acyclic: any partition in which values go forward only, not just runs of the model's order.

Choose it when the model has branches, or when the best cut into runs is uneven and a few nodes beside the main path
could move. Where the model has few branches (up to `ideals` ways to begin it), all partitions are compared, and the
result is proven to be the best there is. Else, and with several stages per rank, it improves cuts of several orders by
moving single nodes, with rollback, first joined to larger atoms and then taken apart (multilevel).
"""

from dataclasses import dataclass

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import as_int
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.search.bill import Rates
from penstock.partitioners.search.bounds import lower_bound
from penstock.partitioners.search.contraction import without_weightless
from penstock.partitioners.search.cutting import cut
from penstock.partitioners.search.ideals import Ideals, all_ideals
from penstock.partitioners.search.judge import Judged
from penstock.partitioners.search.minimax import Chains, nudged
from penstock.partitioners.search.moves import improved
from penstock.partitioners.search.multilevel import best_of
from penstock.partitioners.search.outcome import division

_CLOSE = 1.001
"""times the bound, up to which no search is begun"""


@dataclass(frozen=True)
class Acyclic(Partitioner):
    """Exact where it can be, else a search; never worse than linear and pipedream."""

    name = "acyclic"
    ideals: int = 2000
    """ways to begin the model up to which all partitions are compared"""
    attempts: int = 4
    """orders that are tried, twice"""

    def __post_init__(self) -> None:
        for option in ("ideals", "attempts"):
            if (as_int(getattr(self, option)) or 0) < 1:
                raise PartitionError(f"{option} must be a whole number, 1 or more", given=repr(getattr(self, option)))

    def divide(self, problem: Problem) -> Division:
        rates = Rates.of(problem)
        runs = cut(problem, problem.atoms, rates)
        start, least = Judged(problem, problem.atoms, runs.stage), 0.0
        exact = self._exact(problem, rates) if problem.is_single else None
        if exact:
            found, least = exact
            why = "all partitions compared" if least else "all partitions compared, nodes that take no time aside"
        elif (found := improved(start)).score.excess == 0 and found.score.busiest <= _CLOSE * lower_bound(problem):
            why = "nodes moved between runs of the model's order, which were even already"
        else:
            found = min(found, best_of(problem, self.attempts), key=lambda judged: judged.score)
            why = "nodes moved between the stages of the best of several cuts"
        best = min(start, found, key=lambda judged: judged.score)
        return division(problem, best.stage, why, bounds=(least, runs.bound))

    def _exact(self, problem: Problem, rates: Rates) -> tuple[Judged, float] | None:
        """The best chain of ideals, and the load that no partition can stay below, 0 if that is not proven."""
        whole_atoms, joined = np.arange(len(problem.atoms)), without_weightless(problem.atoms, problem.num_stages)
        # What takes no time can be put aside without loss, unless bytes count.
        is_plain = not (rates.has_messages or rates.has_limits)
        for group in (joined,) if is_plain else (whole_atoms, joined):
            inside = all_ideals(atoms := problem.atoms.merged(group), self.ideals)
            if inside is None:
                continue
            chains = Chains(Ideals(atoms, inside, not rates.overlaps).levels, problem.num_stages, len(inside))
            least = chains.least_load(rates.loads)
            if np.isinf(least):
                continue
            chain = chains.fewest_bytes(rates.loads, nudged(least))
            # An atom is in the stage that ends with the first ideal it is inside of.
            stage = inside[chain[1:]].argmax(axis=0)
            # Named links are told apart by the judge only.
            is_proof = is_plain or (len(atoms) == len(problem.atoms) and not problem.cluster.links)
            return improved(Judged(problem, problem.atoms, stage[group])), least if is_proof else 0.0
        return None
