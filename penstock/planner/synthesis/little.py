"""little: Little's law for memory; microbatches hold bytes for some time, and a rank has only so many bytes."""

from math import inf

import numpy as np

from penstock.planner.synthesis.rows import Floats, Rows


def residence(rows: Rows, row: int) -> Floats:
    """The least seconds from the start of a pass to the start of each other of its microbatch; -inf where none."""
    found = np.full(rows.num_rows, -inf)
    found[row] = 0.0
    for other in rows.sequence:
        for need in rows.needed_by[other]:
            found[other] = max(found[other], found[need.needed] + rows.seconds[need.needed] + need.lag)
    return found


def memory_bound(rows: Rows, begin: Floats, end: Floats, rank: int) -> float:
    """Bytes x seconds that all microbatches hold on a rank, over its bytes; `begin` and `end` are heads, also mirrored.

    Before so many passes can have started that the memory is full, the rest of it is lost, at both ends.
    """
    room = rows.shop.room[rank]
    if room == inf or room <= 0:
        return 0.0
    held = 0.0
    for stage in rows.shop.stages[rank]:
        ways = residence(rows, 3 * stage) + rows.seconds
        held -= sum(rows.taken[3 * stage + part] * ways[3 * stage + part] for part in (1, 2))
    lost = sum(
        _lost(heads[list(rows.of_rank[rank])], sign * rows.taken[list(rows.of_rank[rank])], room)
        for heads, sign in ((begin, 1.0), (end, -1.0))
    )
    return (held * rows.shop.num_microbatches + lost) / room


def _lost(heads: Floats, taken: Floats, room: float) -> float:
    """Bytes x seconds that cannot be held because too few takers can have started."""
    takers = np.flatnonzero(taken > 0)
    moments = heads[takers].ravel()
    sequence = np.argsort(moments, kind="stable")
    filled = np.cumsum(np.repeat(taken[takers], heads.shape[1])[sequence])
    before = np.concatenate(([0.0], filled))[:-1]
    gaps = np.diff(moments[sequence], prepend=0.0)
    return float((np.maximum(room - before, 0.0) * gaps).sum())
