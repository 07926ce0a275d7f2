"""bounds: seconds that no partition of a problem can stay below."""

import numpy as np

from penstock.partitioners.atoms.uses import Floats
from penstock.partitioners.base import Problem


def lower_bound(problem: Problem) -> float:
    """The larger of: all work shared out evenly, and what some rank must take because atoms are not divisible."""
    ranks = sorted(set(problem.placed.ranks))
    slowness = problem.slowness_of[ranks]
    atoms = problem.atoms
    work = float(atoms.seconds.sum() + atoms.free.seconds.sum())
    return max(work / float((1 / slowness).sum()), pigeonhole(atoms.seconds, len(ranks)) * float(slowness.min()))


def pigeonhole(seconds: Floats, num_ranks: int) -> float:
    """Of the k * ranks + 1 longest atoms, k + 1 share a rank: at best the shortest of them."""
    longest = np.sort(seconds)[::-1]
    added = np.concatenate(([0.0], np.cumsum(longest)))
    k = np.arange((len(longest) - 1) // num_ranks + 1)
    return float((added[k * num_ranks + 1] - added[k * num_ranks - k]).max())
