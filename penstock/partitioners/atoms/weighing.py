"""Weighing: how much a run of atoms weighs, where atoms have weights of their own and share things that weigh."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.partitioners.atoms.uses import Floats, Uses
from penstock.partitioners.atoms.windows import Box, Windows


@dataclass(frozen=True)
class Weighing:
    """`added` is what all atoms before each place weigh; `shared` is what a run pays on top. Longer runs weigh more."""

    added: Floats
    shared: Windows

    @classmethod
    def of(cls, own: Floats, uses: Uses, weights: Floats) -> "Weighing":
        """Atoms with weights of their own, and things that weigh once per run; what one atom uses alone is its own."""
        number = len(own)
        atom = np.minimum(uses.atom, number - 1)
        users = np.bincount(uses.thing, minlength=len(weights))
        alone = users[uses.thing] == 1
        own = own + np.bincount(atom[alone], weights[uses.thing[alone]], minlength=number)
        rest = Uses(uses.thing[~alone], uses.atom[~alone])
        return cls(np.concatenate(([0.0], np.cumsum(own))), Windows.of(rest, weights, number))

    def over(self, box: Box) -> Floats:
        """The weight of every run of a box."""
        own = self.added[None, box.low : box.high + 1] - self.added[box.first : box.last + 1, None]
        return own + self.shared.over(box) if len(self.shared) else own

    def of_run(self, start: int, end: int) -> float:
        """The weight of one run."""
        if not len(self.shared):
            return self._added[end] - self._added[start]
        return float(self.over(Box(start, start, end, end))[0, 0])

    def farthest(self, start: int, limit: float) -> int:
        """The last place at which a run from `start` may end."""
        added = self._added
        end = bisect_right(added, added[start] + limit, start) - 1
        # The sum and the difference are rounded differently.
        while end < len(added) - 1 and added[end + 1] - added[start] <= limit:
            end += 1
        while added[end] - added[start] > limit:
            end -= 1
        if not len(self.shared):
            return end
        return start - 1 + bisect_right(self.over(Box(start, start, start, end))[0].tolist(), limit)

    def nearest(self, end: int, limit: float) -> int:
        """The first place at which a run to `end` may begin."""
        added = self._added
        start = bisect_left(added, added[end] - limit, 0, end)
        while start > 0 and added[end] - added[start - 1] <= limit:
            start -= 1
        while added[end] - added[start] > limit:
            start += 1
        if not len(self.shared):
            return start
        falling = self.over(Box(start, end, end, end))[:, 0]
        return start + bisect_left((-falling).tolist(), -limit)

    @cached_property
    def _added(self) -> list[float]:
        values: list[float] = self.added.tolist()
        return values
