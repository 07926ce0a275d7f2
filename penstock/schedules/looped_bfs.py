"""Stages are placed round robin; each stage runs all microbatches before the next stage does.

Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism". Choose it with sharded parameters and several stages per
rank: a stage's parameters are gathered once for all microbatches. It holds all microbatches of all stages.

For 2 ranks and 4 microbatches:

    rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   .   2B3 2B3 2B2 2B2 2B1 2B1 2B0 2B0 0B3 0B3 0B2 0B2 0B1 0B1 0B0 0B0
    rank 1 | .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B3 3B3 3B2 3B2 3B1 3B1 3B0 3B0 1B3 1B3 1B2 1B2 1B1 1B1 1B0 1B0 .   .
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Kind, Orders, Placement, Schedule
from penstock.schedules.base import Scheduler, passes


@dataclass(frozen=True)
class LoopedBFS(Scheduler):
    """Any number of stages per rank; backwards in exactly the reverse order of the forwards."""

    stages_per_rank: int = 2
    name = "looped_bfs"

    def build(self, ranks: int, microbatches: int) -> Schedule:
        stages = np.repeat(np.arange(self.stages_per_rank) * ranks, microbatches)
        numbers = np.tile(np.arange(microbatches), self.stages_per_rank)
        orders = [
            np.concatenate(
                (
                    passes(Kind.FORWARD, stages + rank, numbers),
                    passes(Kind.BACKWARD, stages[::-1] + rank, numbers[::-1]),
                )
            )
            for rank in range(ranks)
        ]
        return Schedule(Placement.loop(ranks, self.stages_per_rank), microbatches, Orders(orders))
