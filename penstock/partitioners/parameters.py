"""parameters: runs of the model's order, so that the rank with the most parameters has as few bytes of them as can be.

Choose it before anything is measured, when blocks differ in size, or when parameters are what fills the memory. Tied
parameters count once per stage.
"""

from dataclasses import dataclass, replace

import numpy as np

from penstock.partitioners.atoms.atoms import Free
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.search.bill import Rates
from penstock.partitioners.search.cutting import cut
from penstock.partitioners.search.judge import Judged
from penstock.partitioners.search.outcome import division


@dataclass(frozen=True)
class Parameters(Partitioner):
    """Bytes of parameters count, seconds do not."""

    name = "parameters"

    def divide(self, problem: Problem) -> Division:
        atoms, tensors = problem.atoms, problem.atoms.tensors
        # A tensor is paid by every stage that uses it, just like a node that depends on inputs only.
        nothing = np.zeros(len(tensors.parameters))
        shared = Free((), tensors.parameters, nothing, tensors.uses, nothing.astype(np.int64) - 1)
        # Less than a byte in all, so that seconds decide where bytes do not.
        weighed = replace(atoms, seconds=0.5 * atoms.seconds / max(float(atoms.seconds.sum()), 1e-30), free=shared)
        rates = replace(Rates.of(problem).without_messages, slowness=np.ones(problem.num_stages))
        found = cut(problem, weighed, rates)
        most = max(
            Judged(replace(problem, cluster=replace(problem.cluster, slowness=None)), weighed, found.stage).loads
        )
        why = f"runs of the model's order, even in parameters: {int(most)} bytes at most on one rank"
        return division(problem, found.stage, why)
