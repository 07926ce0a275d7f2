"""looped_bfs: stages go round the ranks; each stage runs all microbatches before the next stage does.

Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism". Choose it with sharded parameters and several stages per
rank: a stage's parameters are gathered once for all microbatches. It holds all microbatches of all stages.
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir.action import Kind
from penstock.ir.orders import Orders
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.schedules.base import Scheduler, passes


@dataclass(frozen=True)
class LoopedBFS(Scheduler):
    """Any number of stages per rank; backwards in exactly the reverse order of the forwards."""

    stages_per_rank: int = 2
    name = "looped_bfs"

    def build(self, ranks: int, microbatches: int) -> Schedule:
        stages = np.repeat(np.arange(self.stages_per_rank) * ranks, microbatches)
        each = np.tile(np.arange(microbatches), self.stages_per_rank)
        orders = [
            np.concatenate(
                (
                    passes(Kind.FORWARD, stages + rank, each),
                    passes(Kind.BACKWARD, stages[::-1] + rank, each[::-1]),
                )
            )
            for rank in range(ranks)
        ]
        return Schedule(Placement.loop(ranks, self.stages_per_rank), microbatches, Orders(orders))
