"""bound: seconds below which no order can come, with the reason.

Four things that no order escapes, and the largest of them:

- *path*: a pass, what must come before it and what must come after it;
- *work*: a rank computes all the time except where it cannot. It cannot before its first values arrive, nor, having
  filled its memory, before the first gradients return; mirrored in time, the same holds for its end. Up to a moment t
  a rank has done at most the passes that can have started by then and fit in its memory; if those up to t and those of
  the last u seconds are not all of its passes, a step takes t + u and the rest;
- *memory* (Little's law): bytes x seconds that microbatches hold, over the bytes that there are.

For the span, each rank is taken alone, with the least time that other ranks need between two of its passes.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from penstock.planner.synthesis.heads import heads
from penstock.planner.synthesis.little import memory_bound, residence
from penstock.planner.synthesis.problem import Problem
from penstock.planner.synthesis.rows import Need, Rows
from penstock.planner.synthesis.shop import Shop
from penstock.planner.synthesis.starvation import busy_bound, idle

_CAUTION = 1e-9
"""the share of a bound that may be rounding"""


class Bound(NamedTuple):
    """No order takes less than so many seconds, because of `why`."""

    seconds: float
    why: str


def lower_bound(problem: Problem) -> Bound:
    """The certified bound of a problem in its objective."""
    shop = Shop.of(problem)
    rows = Rows.least(shop)
    if problem.objective == "makespan":
        found = [*_bounds(rows, range(shop.num_ranks)), *_crowded(rows, problem.cluster.cores)]
    else:
        found = [each for rank in range(shop.num_ranks) for each in _bounds(_alone(rows, rank), (rank,))]
    best = max(found)
    return Bound(best.seconds * (1 - _CAUTION), best.why)


def _bounds(rows: Rows, ranks: Iterable[int]) -> list[Bound]:
    mirrored = rows.mirrored()
    begin, end = heads(rows), heads(mirrored)
    found = []
    for rank in ranks:
        mine = list(rows.of_rank[rank])
        path = (begin[mine] + rows.seconds[mine, None] + end[mine][:, ::-1]).max()
        total = rows.share * rows.seconds[mine].sum() * rows.shop.num_microbatches
        busy = busy_bound(total, idle(rows, begin, rank), idle(mirrored, end, rank))
        found.append(Bound(float(path), f"path through rank {rank}"))
        found.append(Bound(busy, f"work and forced idle time of rank {rank}"))
        found.append(Bound(memory_bound(rows, begin, end, rank), f"memory of rank {rank}"))
    return found


def _crowded(rows: Rows, cores: int | None) -> list[Bound]:
    """Ranks that share fewer cores than they are cannot work faster than those."""
    if cores is None or cores >= rows.shop.num_ranks:
        return []
    work = rows.share * float(rows.seconds.sum()) * rows.shop.num_microbatches
    return [Bound(work / cores, f"work of all ranks on {cores} cores")]


def _alone(rows: Rows, rank: int) -> Rows:
    """The rows of one rank only, with what happens between them elsewhere as a delay."""
    mine = rows.of_rank[rank]
    needs = []
    for row in mine:
        ways = residence(rows, row)
        needs += [
            Need(other, row, latency=float(ways[other] - rows.seconds[row]))
            for other in mine
            if other != row and ways[other] > -inf
        ]
    return replace(rows, needs=tuple(needs))
