"""thinning: fewer and larger atoms for searches that look at all pairs of places, cut where few bytes cross."""

import numpy as np

from penstock.partitioners.atoms.uses import Ints
from penstock.partitioners.atoms.windows import Box
from penstock.partitioners.search.runs import Runs


def thinned(runs: Runs, number: int) -> Ints:
    """A group per atom, at most `number` groups of consecutive atoms, about even in weight and in count."""
    atoms = len(runs.atoms)
    if atoms <= number:
        return np.arange(atoms)
    added = runs.weighing.added
    by_weight = added / added[-1] if added[-1] > 0 else np.zeros_like(added)
    share = (by_weight + np.arange(atoms + 1) / atoms) / 2
    bucket = np.minimum((share[1:-1] * number).astype(np.int64), number - 1)
    crossing = runs.bytes(Box(0, atoms, atoms, atoms))[1:-1, 0]
    # The cheapest place of every bucket stays open.
    by_bucket = np.lexsort((crossing, bucket))
    opened = by_bucket[np.diff(bucket[by_bucket], prepend=-1) > 0]
    starts = np.zeros(atoms, dtype=np.int64)
    starts[opened[: number - 1] + 1] = 1
    return np.cumsum(starts)
