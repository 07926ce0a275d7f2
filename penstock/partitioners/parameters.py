"""Cuts the model's order into runs with the fewest bytes of parameters on the rank that has the most.

Choose it before anything is measured, when blocks differ in size, or when parameters fill the memory. Tied parameters
count once per stage.
"""

from dataclasses import dataclass, replace

import numpy as np

from penstock.partitioners.atoms import InputOnly
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.costs import CostRates
from penstock.partitioners.score import Score, division
from penstock.partitioners.search.contiguous import cut_runs


@dataclass(frozen=True)
class Parameters(Partitioner):
    """Balances bytes of parameters and ignores seconds."""

    name = "parameters"
    is_tried = False

    def divide(self, problem: Problem) -> Division:
        atoms, tensors = problem.atoms, problem.atoms.tensors
        # Every stage that uses a tensor holds it, as every stage that uses an input-only node runs it: so bytes of
        # parameters are given to the search as seconds of such nodes.
        nothing = np.zeros(len(tensors.parameters))
        shared = InputOnly((), tensors.parameters, nothing, tensors.uses, nothing.astype(np.int64) - 1)
        # Less than a byte in all, so that seconds decide only where bytes do not.
        seconds = 0.5 * atoms.seconds / max(float(atoms.seconds.sum()), 1e-30)
        weighed = replace(atoms, seconds=seconds, input_only=shared)
        rates = replace(CostRates.of(problem).without_messages, slowness=np.ones(problem.num_stages))
        found = cut_runs(problem, weighed, rates)
        equal_ranks = replace(problem, cluster=replace(problem.cluster, slowness=None))
        most = max(Score(equal_ranks, weighed, found.stage).loads)
        why = f"runs of the model's order, even in parameters: {int(most)} bytes at most on one rank"
        return division(problem, found.stage, why)
