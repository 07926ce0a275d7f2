"""Dependence: who waits for whom, worked out for whole orders at once from the rules of `action.py`."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import RULES, Fact, Kind, Whose
from penstock.ir.code import Codes
from penstock.ir.cuts import Cuts, Edge
from penstock.ir.orders import Passes

Indices = NDArray[np.int64]


class Dependencies(NamedTuple):
    """Pairs (waiter, needed) of indices: the action at `waiter` cannot run before the one at `needed`.

    The stage `target` waits for a fact about the stage `source`. Where nothing makes it, `needed` is -1.
    """

    waiter: Indices
    needed: Indices
    fact: Codes
    source: Codes
    target: Codes
    microbatch: Codes

    def where(self, chosen: NDArray[np.bool_]) -> "Dependencies":
        """The chosen ones."""
        return Dependencies(*(column[chosen] for column in self))


class Makers:
    """Which action makes each fact: `makers[fact]` holds indices by (stage, microbatch), -1 where none does."""

    def __init__(self, passes: Passes, num_stages: int, num_microbatches: int) -> None:
        shape = (num_stages, num_microbatches)
        self._index = {fact: np.full(shape, -1, dtype=np.int64) for fact in Fact}
        self._times = {fact: np.zeros(num_stages * num_microbatches, dtype=np.int64) for fact in Fact}
        for kind, rule in RULES.items():
            chosen = passes.kind == kind
            stage, microbatch = passes.stage[chosen], passes.microbatch[chosen]
            for fact in rule.makes:
                self._index[fact][stage, microbatch] = passes.index[chosen]
                self._times[fact] += np.bincount(
                    stage * num_microbatches + microbatch, minlength=num_stages * num_microbatches
                )

    def __getitem__(self, fact: Fact) -> Indices:
        return self._index[fact]

    def times(self, fact: Fact) -> Indices:
        """How often each fact is made, by (stage, microbatch)."""
        return self._times[fact].reshape(self._index[fact].shape)


def find_dependencies(passes: Passes, makers: Makers, cuts: Cuts) -> Dependencies:
    """All dependencies between the compute actions, for any cuts."""
    found = [
        _dependencies_of_need(passes, makers, cuts, need)
        for need in ((kind, fact, whose) for kind, rule in RULES.items() for fact, whose in rule.needs)
    ]
    return Dependencies(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _dependencies_of_need(passes: Passes, makers: Makers, cuts: Cuts, need: tuple[Kind, Fact, Whose]) -> Dependencies:
    kind, fact, whose = need
    chosen = np.flatnonzero(passes.kind == kind)
    stage = passes.stage[chosen]
    if whose is Whose.OWN:
        other = target = stage
    else:
        edges = cuts.edges if whose is Whose.PRODUCERS else cuts.gradient_edges
        towards = (1, 0) if whose is Whose.PRODUCERS else (0, 1)
        rows, other = neighbours(stage, edges, towards, cuts.num_stages)
        chosen, target = chosen[rows], stage[rows]
    microbatch = passes.microbatch[chosen]
    return Dependencies(
        passes.index[chosen],
        makers[fact][other, microbatch],
        np.full(len(chosen), fact, dtype=np.int64),
        other,
        target,
        microbatch,
    )


def neighbours(
    stage: Indices, edges: tuple[Edge, ...], towards: tuple[int, int], num_stages: int
) -> tuple[Indices, Indices]:
    """For each given stage, every stage at the other end of its edges: pairs (row of `stage`, other stage)."""
    own, far = towards
    table = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    table = table[np.argsort(table[:, own], kind="stable")]
    degree = np.bincount(table[:, own], minlength=num_stages)
    first = np.concatenate(([0], np.cumsum(degree)))
    counts = degree[stage]
    rows = np.repeat(np.arange(len(stage), dtype=np.int64), counts)
    nth = np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, table[first[stage[rows]] + nth, far]
