"""starvation: how long a rank must stand still, because nothing has arrived yet or because its memory is full.

Up to a moment a rank has run at most the passes whose heads lie before it. Those that give bytes back or hold none
have all run, at best; of those that take bytes, as many as fit, and at best the longest per byte. What is missing to
the moment is idle, however the passes are ordered.
"""

from math import gcd, inf

import numpy as np

from penstock.planner.synthesis.rows import Floats, Rows


def idle(rows: Rows, heads: Floats, rank: int) -> Floats:
    """Pairs (moment, idle seconds up to it), each longer idle than those before."""
    mine = list(rows.of_rank[rank])
    moments = np.unique(heads[mine])
    # A head that differs from the moment only by rounding does not lie before it.
    grace = 1e-12 * float(moments[-1])
    begun = {row: np.searchsorted(heads[row], moments - grace, side="left") for row in mine}
    takers = [row for row in mine if rows.taken[row] > 0]
    work = sum((rows.seconds[row] * begun[row] for row in mine if row not in takers), np.zeros(len(moments)))
    work += _packed(rows, takers, begun, _capacity(rows, rank, begun, mine))
    missing = np.maximum(moments - rows.share * work - grace, 0.0)
    highest = np.maximum.accumulate(missing)
    is_new = np.concatenate(([True], highest[1:] > highest[:-1]))
    return np.stack((moments[is_new], missing[is_new]), axis=1)


def _capacity(rows: Rows, rank: int, begun: dict[int, "np.ndarray"], mine: list[int]) -> Floats:
    """Bytes that passes of the rank may have taken by each moment, those given back included."""
    room = rows.shop.room[rank]
    given = sum((-rows.taken[row] * begun[row] for row in mine if rows.taken[row] < 0), np.zeros(1))
    sizes = [float(rows.taken[row]) for row in mine if rows.taken[row]]
    if room == inf or not all(size.is_integer() for size in sizes):
        return np.asarray(room + given)
    # Whatever is held is a multiple of what all sizes have in common.
    step = gcd(*(int(size) for size in sizes)) or 1
    return np.asarray(room // step * step + given)


def _packed(rows: Rows, takers: list[int], begun: dict[int, "np.ndarray"], capacity: Floats) -> Floats:
    """The longest work of passes that take bytes, as if the last of them could be cut to size."""
    left, work = capacity, np.zeros(1)
    for row in sorted(takers, key=lambda row: -rows.seconds[row] / rows.taken[row]):
        count = np.minimum(begun[row], np.maximum(left, 0.0) / rows.taken[row])
        left, work = left - count * rows.taken[row], work + count * rows.seconds[row]
    return work


def busy_bound(total: float, begin: Floats, end: Floats) -> float:
    """Seconds of a step in which a rank works for `total` and is idle as `begin` and, mirrored, `end` say.

    A moment and a mirrored one are both idle in full unless they overlap, which they do not if less than all of the
    work fits into them.
    """
    moments = begin[:, None, 0] + end[None, :, 0]
    lengths = total + begin[:, None, 1] + end[None, :, 1]
    return float(np.where(lengths > moments, lengths, total).max())
