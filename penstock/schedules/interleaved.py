"""1f1b with several stages per rank, which divides the bubble by their number.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM". Choose it when
links are fast and more activations fit than with 1f1b: at most ranks + (ranks - 1) / stages_per_rank microbatches are
held, where 1f1b holds ranks. Any number of microbatches works; this memory is that of a multiple of the ranks, which
works best.

For 2 ranks and 4 microbatches:

    rank 0 | 0F0 0F1 2F0 2F1 0F2 .   2B0 2B0 0F3 2B1 2B1 2F2 0B0 0B0 2F3 0B1 0B1 .   2B2 2B2 .   2B3 2B3 0B2 0B2 0B3 0B3
    rank 1 | .   1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1F3 1B1 1B1 3F2 3B2 3B2 3F3 3B3 3B3 1B2 1B2 1B3 1B3 .   .
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Ints, Kind, Orders, Placement, Schedule
from penstock.schedules.base import Scheduler, passes, staggered


@dataclass(frozen=True)
class Interleaved(Scheduler):
    """Any number of stages per rank, placed round robin."""

    stages_per_rank: int = 2
    name = "interleaved"

    def build(self, ranks: int, microbatches: int) -> Schedule:
        rounds = Rounds(ranks, microbatches, self.stages_per_rank)
        local, numbers = rounds.sequence()
        last = self.stages_per_rank - 1
        orders = [
            staggered(
                (passes(Kind.FORWARD, local * ranks + rank, numbers), 0),
                (passes(Kind.BACKWARD, (last - local) * ranks + rank, numbers), rounds.lead + 2 * (ranks - 1 - rank)),
            )
            for rank in range(ranks)
        ]
        return Schedule(Placement.loop(ranks, self.stages_per_rank), microbatches, Orders(orders))


@dataclass(frozen=True)
class Rounds:
    """The sequence in which an interleaved schedule visits the stages of a rank.

    Microbatches go through the ranks in rounds; a round visits every stage of a rank before the next round begins.
    There are microbatches // ranks rounds, at least one, as equal as possible, longer ones first.
    """

    ranks: int
    microbatches: int
    stages_per_rank: int

    @property
    def sizes(self) -> Ints:
        """Microbatches of each round."""
        count = max(1, self.microbatches // self.ranks)
        return np.array([part.size for part in np.array_split(np.arange(self.microbatches), count)])

    @property
    def lead(self) -> int:
        """Number of forwards that a rank runs before the first one of its last stage."""
        return (self.stages_per_rank - 1) * int(self.sizes[0])

    def sequence(self) -> tuple[Ints, Ints]:
        """The sequence of forwards: stages of the rank, counted from 0, and numbers of microbatches."""
        last = np.cumsum(self.sizes)
        rounds = [np.arange(end - size, end) for size, end in zip(self.sizes, last, strict=True)]
        local = np.concatenate([np.repeat(np.arange(self.stages_per_rank), size) for size in self.sizes])
        return local, np.concatenate([np.tile(numbers, self.stages_per_rank) for numbers in rounds])
