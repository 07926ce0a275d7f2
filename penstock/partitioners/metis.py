"""metis: k-way parts of METIS on seconds of nodes and bytes of values, made acyclic and repaired.

Choose it for wide models with many branches, where the order of the model says little about where few bytes cross.
METIS knows no direction: its parts are put in order, nodes that would read from a later part are moved, and the result
is improved by moves. Needs the extra `metis`. It is never worse than linear, which is among what it improves.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import as_int
from penstock.partitioners.atoms.uses import Floats, Ints
from penstock.partitioners.base import Division, Partitioner, Problem
from penstock.partitioners.search.bill import Rates
from penstock.partitioners.search.contraction import edge_bytes
from penstock.partitioners.search.cutting import cut
from penstock.partitioners.search.judge import Judged
from penstock.partitioners.search.moves import improved
from penstock.partitioners.search.multilevel import cut_in_order
from penstock.partitioners.search.orders import ordered
from penstock.partitioners.search.outcome import division

_FINENESS = 1_000_000
"""what weights sum to at most, as METIS takes whole numbers"""


@dataclass(frozen=True)
class Metis(Partitioner):
    """The best of several attempts, each with another seed."""

    name = "metis"
    attempts: int = 6

    def __post_init__(self) -> None:
        if (as_int(self.attempts) or 0) < 1:
            raise PartitionError("attempts must be a whole number, 1 or more", attempts=repr(self.attempts))

    def divide(self, problem: Problem) -> Division:
        pymetis = load()
        rates = Rates.of(problem)
        runs = cut(problem, problem.atoms, rates)
        found = [Judged(problem, problem.atoms, runs.stage)]
        for seed in range(self.attempts):
            part = _parts(pymetis, problem, seed)
            found += _repaired(problem, part, rates)
        promising = sorted(found[1:], key=lambda judged: judged.score)[: self.attempts]
        best = min(map(improved, [found[0], *promising]), key=lambda judged: judged.score)
        why = f"the best of {self.attempts} attempts of METIS, made acyclic"
        return division(problem, best.stage, why, bounds=(0.0, runs.bound))


def is_installed() -> bool:
    """Whether the library is there."""
    return find_spec("pymetis") is not None


def load() -> Any:
    """The library, or an error that says how to get it."""
    try:
        import pymetis
    except ImportError:
        raise PartitionError("metis is not installed", hint="pip install 'penstock[metis]', or acyclic") from None
    return pymetis


def _parts(pymetis: Any, problem: Problem, seed: int) -> Ints:
    """The part of every atom, parts being numbered by where their atoms are on average."""
    atoms, number = problem.atoms, problem.num_stages
    source, target = atoms.arrows.thing, atoms.arrows.atom
    ends, others = np.concatenate((source, target)), np.concatenate((target, source))
    by_end = np.lexsort((others, ends))
    weights = np.tile(_whole(edge_bytes(atoms)), 2)[by_end]
    starts = np.searchsorted(ends[by_end], np.arange(len(atoms) + 1))
    slowness = problem.slowness_of[list(problem.placed.ranks)]
    options = pymetis.Options(seed=seed, ncuts=4, niter=20, ufactor=1 + 10 * seed)
    _, part = pymetis.part_graph(
        number,
        pymetis.CSRAdjacency(starts.tolist(), others[by_end].tolist()),
        vweights=_whole(atoms.seconds).tolist(),
        eweights=weights.tolist(),
        tpwgts=((1 / slowness) / (1 / slowness).sum()).tolist() if number > 1 else None,
        options=options,
    )
    return _in_order(np.array(part), number)


def _whole(weights: Floats) -> Ints:
    return 1 + (weights * (_FINENESS / max(float(weights.sum()), 1e-30))).astype(np.int64)


def _in_order(part: Ints, number: int) -> Ints:
    size = np.bincount(part, minlength=number)
    middle = np.bincount(part, np.arange(len(part)), minlength=number) / np.maximum(size, 1)
    return np.argsort(np.argsort(np.where(size > 0, middle, np.inf), kind="stable"))[part]


def _repaired(problem: Problem, part: Ints, rates: Rates) -> list[Judged]:
    """Partitions near to the parts: atoms moved behind or before those they disagree with, or all cut in that order."""
    atoms = problem.atoms
    later, earlier = part.copy(), part.copy()
    for atom in range(len(atoms)):
        later[atom] = max([later[atom], *later[atoms.predecessors[atom]]])
    for atom in reversed(range(len(atoms))):
        earlier[atom] = min([earlier[atom], *earlier[atoms.successors[atom]]])
    moved = [Judged(problem, atoms, stage) for stage in (later, earlier) if len(np.unique(stage)) == problem.num_stages]
    return [*moved, cut_in_order(problem, ordered(atoms, part.astype(np.float64)), rates)]
