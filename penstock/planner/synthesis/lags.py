"""lags: what a limit of memory says about which pass must have run before which.

A *lag* (row, needed, shift) means: pass k of `row` cannot start before pass k - shift of `needed` has ended. Two kinds
follow from the bytes that a rank may hold:

- *Room.* When a pass starts, the takers that come before it have run for its microbatch and all earlier ones. What
  exceeds the room must have been given back by passes of earlier microbatches, which in turn need others.
- *Escape.* What is held for a microbatch is given back only after all its passes on the rank that take bytes have run.
  A row that runs too far ahead of another one would leave no room for the other, for ever.
"""

from math import floor, inf
from typing import NamedTuple

from penstock.planner.synthesis.rows import Rows


class Lag(NamedTuple):
    """Pass k of `row` starts after pass k - shift of `needed` has ended."""

    row: int
    needed: int
    shift: int


def lags(rows: Rows) -> tuple[Lag, ...]:
    """Everything that the memory of the ranks demands."""
    room = rows.shop.room
    return tuple(
        lag
        for rank, mine in enumerate(rows.of_rank)
        if room[rank] < inf
        for row in mine
        for lag in (*_room(rows, row, room[rank]), *_escape(rows, row, room[rank]))
    )


def _room(rows: Rows, row: int, room: float) -> list[Lag]:
    """Takers that come before `row` hold bytes; those who give them back come after it."""
    mine = rows.of_rank[int(rows.rank[row])]
    held: dict[int, float] = {}
    for taker in mine:
        if rows.taken[taker] > 0 and rows.precedes[taker, row]:
            held[taker // 3] = held.get(taker // 3, 0.0) + float(rows.taken[taker])
    given = {g: bytes_ for stage, total in held.items() for g, bytes_ in _givers(rows, row, stage, total).items()}
    total = sum(held[stage] for stage in {giver // 3 for giver in given})
    found = []
    for needed in mine:
        if needed == row or not rows.precedes[row, needed]:
            continue
        freed = sum(given[giver] for giver in given if rows.precedes[needed, giver])
        if freed > 0:
            found.append(Lag(row, needed, max(floor((room - total) / freed) + 1, 1)))
    return found


def _givers(rows: Rows, row: int, stage: int, total: float) -> dict[int, float]:
    """Who gives back, after `row`, the bytes that a stage has taken up to `row`; nothing if some may be back before."""
    givers = {3 * stage + part: -float(rows.taken[3 * stage + part]) for part in range(3)}
    givers = {giver: bytes_ for giver, bytes_ in givers.items() if bytes_ > 0}
    if not all(rows.precedes[row, giver] for giver in givers):
        return {}
    # A stage that takes in two steps may have taken only one of them by now.
    excess = sum(givers.values()) - total
    return {giver: max(bytes_ - excess, 0.0) for giver, bytes_ in givers.items()}


def _escape(rows: Rows, row: int, room: float) -> list[Lag]:
    """How far `row` may run ahead of the other takers without which its bytes never come back."""
    if rows.taken[row] <= 0:
        return []
    mine = rows.of_rank[int(rows.rank[row])]
    givers = [giver for giver in range(row // 3 * 3, row // 3 * 3 + 3) if rows.taken[giver] < 0]
    others = [
        taker
        for taker in mine
        if taker != row and rows.taken[taker] > 0 and all(rows.precedes[taker, giver] for giver in givers)
    ]
    kept = sum(float(rows.taken[taker]) for taker in others)
    shift = max(floor((room - kept) / float(rows.taken[row])), 1)
    return [Lag(row, taker, shift) for taker in others if not rows.precedes[taker, row]]
