"""Uses: which atoms use which things, where a stage pays for a thing once, however many of its atoms use it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Uses:
    """Pairs of a thing and an atom that uses it, each pair once, by thing and then by atom."""

    thing: Ints
    atom: Ints

    @classmethod
    def of(cls, things: Sequence[int] | Ints, atoms: Sequence[int] | Ints) -> "Uses":
        """The pairs in any order, repeated or not."""
        thing, atom = np.asarray(things, dtype=np.int64), np.asarray(atoms, dtype=np.int64)
        width = int(atom.max()) + 1 if len(atom) else 1
        code = thing * width + atom
        if len(code) and not (np.diff(code) > 0).all():
            code = np.unique(code)
        return cls(code // width, code % width)

    def by_stage(self, stage: Ints) -> "Uses":
        """The same with the stages of the atoms in place of the atoms."""
        return Uses.of(self.thing, stage[self.atom])

    def sums(self, stage: Ints, num_stages: int, weights: Floats) -> Floats:
        """Per stage the weights of all things that it uses."""
        pairs = self.by_stage(stage)
        return sums(pairs.atom, weights[pairs.thing], num_stages)


def sums(group: Ints, weights: Floats, number: int) -> Floats:
    """Per group, of so many, the sum of the weights that belong to it."""
    return np.bincount(group, weights, minlength=number).astype(np.float64)
