"""Reductions: when the gradients of every stage are averaged over the replicas, beside the passes that still run."""

import numpy as np
from numpy.typing import NDArray

from penstock.ir import Kind, Program, Replicas, StageCosts, stage_of

Seconds = NDArray[np.float64]


def reduced(
    program: Program, costs: StageCosts, replicas: Replicas, starts: Seconds, ends: Seconds
) -> tuple[Seconds, Seconds]:
    """The times of all actions, in which a Reduce lasts from its place in the order until the replicas agree.

    A rank averages one stage after another, and goes on with its passes meanwhile.
    """
    places = np.flatnonzero(program.table.kinds == Kind.REDUCE)
    if replicas.count == 1 or not len(places):
        return starts, ends
    starts, ends = starts.copy(), ends.copy()
    free = [0.0] * program.num_ranks
    for place in places.tolist():
        rank = int(program.table.rank_of[place])
        stage = int(stage_of(program.table.codes[place]))
        starts[place] = max(ends[place], free[rank])
        ends[place] = free[rank] = starts[place] + replicas.reduction_seconds(costs.state[stage].gradients)
    return starts, ends
