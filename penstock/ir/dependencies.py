"""Dependencies between actions, computed for whole orders at once from the rules of action.py."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import RULES, Fact, Relation
from penstock.ir.orders import Codes, Passes
from penstock.ir.placement import Cuts, StageEdge

Indices = NDArray[np.int64]


class Dependencies(NamedTuple):
    """Pairs (waiter, needed) of indices: the action at `waiter` cannot run before the one at `needed` has ended.

    The stage `target` waits for a fact about the stage `source`. If no action makes the fact, `needed` is -1.
    """

    waiter: Indices
    needed: Indices
    fact: Codes
    source: Codes
    target: Codes
    microbatch: Codes

    def where(self, chosen: NDArray[np.bool_]) -> "Dependencies":
        """The rows where `chosen` is true."""
        return Dependencies(*(column[chosen] for column in self))


class Makers:
    """The action that makes each fact: `makers[fact][stage, microbatch]` is its index, -1 if there is none."""

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
        """Number of actions that make each fact, by (stage, microbatch)."""
        return self._times[fact].reshape(self._index[fact].shape)


def find_dependencies(passes: Passes, makers: Makers, cuts: Cuts) -> Dependencies:
    """All dependencies between compute actions, for any cuts."""
    found = []
    for kind, rule in RULES.items():
        for fact, relation in rule.needs:
            chosen = np.flatnonzero(passes.kind == kind)
            source = target = passes.stage[chosen]
            if relation is not Relation.OWN:
                edges = cuts.edges if relation is Relation.PRODUCERS else cuts.gradient_edges
                own_end, far_end = (1, 0) if relation is Relation.PRODUCERS else (0, 1)
                rows, source = _neighbours(target, edges, own_end, far_end, cuts.num_stages)
                chosen, target = chosen[rows], target[rows]
            microbatch = passes.microbatch[chosen]
            facts = np.full(len(chosen), fact, dtype=np.int64)
            needed = makers[fact][source, microbatch]
            found.append((passes.index[chosen], needed, facts, source, target, microbatch))
    return Dependencies(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _neighbours(
    stage: Indices, edges: tuple[StageEdge, ...], own_end: int, far_end: int, num_stages: int
) -> tuple[Indices, Indices]:
    """For each given stage, the stage at the far end of each of its edges: pairs (row of `stage`, other stage).

    `own_end` and `far_end` are the columns of `edges`, 0 for the producer and 1 for the consumer.
    """
    # Edges grouped by their own end; the edges of stage s are table[first[s]:first[s] + degree[s]].
    table = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
    table = table[np.argsort(table[:, own_end], kind="stable")]
    degree = np.bincount(table[:, own_end], minlength=num_stages)
    first = np.concatenate(([0], np.cumsum(degree)))
    counts = degree[stage]
    rows = np.repeat(np.arange(len(stage), dtype=np.int64), counts)
    nth = np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, table[first[stage[rows]] + nth, far_end]
