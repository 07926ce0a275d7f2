"""minimax: the chain of places that makes the busiest stage least busy and, among those, costs the fewest bytes.

Places are the beginnings of the model that a cut may lie behind, ordered so that what is inside another comes before
it: the first is nothing, the last is everything. A stage is the difference of two. Both passes are exact: for every
place and number of stages the best way there is kept.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from penstock.partitioners.atoms.uses import Floats, Ints
from penstock.partitioners.search.bill import Bill


class Level(NamedTuple):
    """Places at which a stage may end, places before at which it may begin, and the bill of every pair.

    A pair that is no stage has infinite seconds.
    """

    begins: Ints
    ends: Ints
    bill: Bill


Levels = Callable[[], Iterable[Level]]
Loads = Callable[[Bill], Floats]
"""how busy each stage (first axis) is with each candidate; infinite if it must not be"""


class Chains(NamedTuple):
    """All chains of so many stages through so many places."""

    levels: Levels
    num_stages: int
    num_places: int

    def least_load(self, loads: Loads) -> float:
        """How busy the busiest stage of the best chain is; infinite if there is no chain."""
        least = np.full((self.num_stages + 1, self.num_places), np.inf)
        least[0, 0] = 0.0
        for begins, ends, bill in self.levels():
            least[1:, ends] = np.maximum(least[:-1, begins, None], loads(bill)).min(axis=1)
        return float(least[-1, -1])

    def fewest_bytes(self, loads: Loads, limit: float) -> list[int]:
        """The places of the chain of stages, none busier than the limit, that costs the fewest bytes."""
        fewest = np.full((self.num_stages + 1, self.num_places), np.inf)
        fewest[0, 0] = 0.0
        parent = np.zeros((self.num_stages + 1, self.num_places), dtype=np.int64)
        for begins, ends, bill in self.levels():
            total = fewest[:-1, begins, None] + np.where(loads(bill) <= limit, bill.bytes, np.inf)
            best: Ints = total.argmin(axis=1)
            fewest[1:, ends] = np.take_along_axis(total, best[:, None], axis=1)[:, 0]
            parent[1:, ends] = begins[best]
        chain = [self.num_places - 1]
        for stage in range(self.num_stages, 0, -1):
            chain.append(int(parent[stage, chain[-1]]))
        return chain[::-1]


def nudged(limit: float) -> float:
    """A limit that sums rounded differently do not miss."""
    return limit * (1 + 1e-12)
