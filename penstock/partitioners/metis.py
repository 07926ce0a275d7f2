"""Makes the k-way parts of METIS, which weigh seconds of nodes and bytes of values, acyclic and improves them.

Choose it for wide models with many branches, where the order of the model is a poor guide to cuts with few bytes.
METIS ignores direction: its parts are put in order, nodes that would read from a later part are moved, and the result
is improved by local search. Needs the extra `metis`. It is never worse than linear, which is among its starting points.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Floats, Ints, is_count
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.costs import CostRates
from penstock.partitioners.score import Score, division
from penstock.partitioners.search.contiguous import cut_runs
from penstock.partitioners.search.local import improve
from penstock.partitioners.search.multilevel import cut_in_order, topological_order

_RESOLUTION = 1_000_000
"""sum of the weights that METIS is given, as it takes whole numbers"""


@dataclass(frozen=True)
class Metis(Partitioner):
    """Takes the best of several attempts, each with another seed."""

    name = "metis"
    is_optional = True
    attempts: int = 6

    def __post_init__(self) -> None:
        if not is_count(self.attempts):
            raise PartitionError("attempts must be a whole number, 1 or more", attempts=repr(self.attempts))

    @classmethod
    def is_available(cls) -> bool:
        return find_spec("pymetis") is not None

    def divide(self, problem: Problem) -> Division:
        try:
            import pymetis
        except ImportError:
            raise PartitionError("metis is not installed", hint="pip install 'penstock[metis]', or acyclic") from None
        rates = CostRates.of(problem)
        runs = cut_runs(problem, problem.atoms, rates)
        found: list[Score] = []
        for seed in range(self.attempts):
            found += _acyclic_scores(problem, _parts(pymetis, problem, seed), rates)
        promising = sorted(found)[: self.attempts]
        best = min(map(improve, [Score(problem, problem.atoms, runs.stage), *promising]))
        why = f"the best of {self.attempts} attempts of METIS, made acyclic"
        return division(problem, best.stage, why, contiguous_bound=runs.bound)


def _parts(pymetis: Any, problem: Problem, seed: int) -> Ints:
    """The part of every atom; parts are numbered by the mean position of their atoms."""
    atoms, number = problem.atoms, problem.num_stages
    source, target = atoms.edges.item, atoms.edges.atom
    ends, others = np.concatenate((source, target)), np.concatenate((target, source))
    by_end = np.lexsort((others, ends))
    weights = np.tile(_to_integers(atoms.edge_bytes), 2)[by_end]
    starts = np.searchsorted(ends[by_end], np.arange(len(atoms) + 1))
    slowness = problem.slowness_of[list(problem.placed.ranks)]
    options = pymetis.Options(seed=seed, ncuts=4, niter=20, ufactor=1 + 10 * seed)
    _, found = pymetis.part_graph(
        number,
        pymetis.CSRAdjacency(starts.tolist(), others[by_end].tolist()),
        vweights=_to_integers(atoms.seconds).tolist(),
        eweights=weights.tolist(),
        tpwgts=((1 / slowness) / (1 / slowness).sum()).tolist() if number > 1 else None,
        options=options,
    )
    part = np.array(found)
    size = np.bincount(part, minlength=number)
    middle = np.bincount(part, np.arange(len(part)), minlength=number) / np.maximum(size, 1)
    in_order: Ints = np.argsort(np.argsort(np.where(size > 0, middle, np.inf), kind="stable"))[part]
    return in_order


def _to_integers(weights: Floats) -> Ints:
    return 1 + (weights * (_RESOLUTION / max(float(weights.sum()), 1e-30))).astype(np.int64)


def _acyclic_scores(problem: Problem, part: Ints, rates: CostRates) -> list[Score]:
    """Acyclic partitions close to the parts: atoms moved to later or to earlier parts, or all cut in that order."""
    atoms = problem.atoms
    later, earlier = part.copy(), part.copy()
    for atom in range(len(atoms)):
        later[atom] = max([later[atom], *later[atoms.predecessors[atom]]])
    for atom in reversed(range(len(atoms))):
        earlier[atom] = min([earlier[atom], *earlier[atoms.successors[atom]]])
    moved = [Score(problem, atoms, stage) for stage in (later, earlier) if len(np.unique(stage)) == problem.num_stages]
    return [*moved, cut_in_order(problem, topological_order(atoms, part.astype(np.float64)), rates)]
