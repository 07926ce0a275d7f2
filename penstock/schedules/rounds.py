"""Rounds: the sequence in which an interleaved schedule visits the stages of a rank."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rounds:
    """Microbatches go through the ranks in rounds; a round visits every stage of a rank before the next round begins.

    There are microbatches // ranks rounds, at least one, as equal as possible, longer ones first.
    """

    ranks: int
    microbatches: int
    stages_per_rank: int

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Microbatches of each round."""
        count = max(1, self.microbatches // self.ranks)
        return np.array([part.size for part in np.array_split(np.arange(self.microbatches), count)])

    @property
    def lead(self) -> int:
        """Forwards that a rank runs before its last stage has its first microbatch."""
        return (self.stages_per_rank - 1) * int(self.sizes[0])

    def sequence(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which (stage of the rank counted from 0, microbatch) comes when, in forward direction."""
        last = np.cumsum(self.sizes)
        each = [np.arange(end - size, end) for size, end in zip(self.sizes, last, strict=True)]
        locals_ = np.concatenate([np.repeat(np.arange(self.stages_per_rank), size) for size in self.sizes])
        return locals_, np.concatenate([np.tile(part, self.stages_per_rank) for part in each])
