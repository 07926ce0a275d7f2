"""Windows: what runs of atoms share, when each thing is paid once per run: sums over all runs of a box at once."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.partitioners.atoms.uses import Floats, Ints, Uses


class Box(NamedTuple):
    """Runs of atoms that begin before atom `first` .. `last` and end before atom `low` .. `high`, all included."""

    first: int
    last: int
    low: int
    high: int

    @property
    def shape(self) -> tuple[int, int]:
        """How many begins, and how many ends."""
        return self.last - self.first + 1, self.high - self.low + 1


@dataclass(frozen=True)
class Windows:
    """A weight counts for the runs that begin behind `before`, not behind `place`, and end behind `place`.

    So a thing that atoms 2, 5 and 9 use is the windows (-1, 2), (2, 5) and (5, 9): of a run that holds several of them
    exactly one counts, the first.
    """

    before: Ints
    place: Ints
    weight: Floats

    @classmethod
    def of(cls, uses: Uses, weights: Floats, num_atoms: int, maker: Ints | None = None) -> "Windows":
        """Things are paid by every run that uses them; those with a maker only by runs that begin behind it."""
        place = np.minimum(uses.atom, num_atoms - 1)
        is_first = np.diff(uses.thing, prepend=-1) != 0
        origin = np.full(len(place), -1, dtype=np.int64) if maker is None else maker[uses.thing]
        before = np.where(is_first, origin, np.roll(place, 1))
        by_place = np.argsort(place, kind="stable")
        weight = weights[uses.thing]
        chosen = by_place[(before < place)[by_place] & (weight != 0)[by_place]]
        return cls(before[chosen], place[chosen], weight[chosen])

    def __len__(self) -> int:
        return len(self.place)

    def over(self, box: Box) -> Floats:
        """The sum of every run of the box: a row per begin, a column per end."""
        rows, columns = box.shape
        if not len(self):
            return np.zeros((rows, columns))
        near = slice(*np.searchsorted(self.place, (box.first, box.high)))
        before, place, weight = self.before[near], self.place[near], self.weight[near]
        inside = before < box.last
        before, place, weight = before[inside], place[inside], weight[inside]
        top = np.maximum(before + 1 - box.first, 0)
        bottom = np.minimum(place - box.first, rows - 1) + 1
        left = np.maximum(place + 1 - box.low, 0)
        change = np.bincount(top * columns + left, weight, minlength=(rows + 1) * columns)
        change -= np.bincount(bottom * columns + left, weight, minlength=(rows + 1) * columns)
        return change.reshape(rows + 1, columns)[:rows].cumsum(axis=0).cumsum(axis=1)
