"""heads: for every pass a moment before which no order at all can start it.

Column by column and row by row, a pass starts after what it needs, after the pass before it in its row, after what
memory demands, and after its rank has had the time to run everything that must come before it there. The last is one
machine with release times: of any set of passes, the work of those released from some moment on comes after it.
"""

from typing import NamedTuple

import numpy as np

from penstock.planner.synthesis.lags import lags
from penstock.planner.synthesis.rows import Floats, Rows

_MACHINE_PASSES = 20_000
"""so many passes at most are held against the work of their rank; the others only against what they need"""
_MACHINE_DEPTH = 48
"""so many passes of a row are looked at, the latest ones"""


class _Before(NamedTuple):
    """What comes before pass k of a row: (needed row, seconds between), (row, shift), and (row, shift) on its rank."""

    needs: list[tuple[int, float]]
    lags: list[tuple[int, int]]
    machine: list[tuple[int, int]]


def heads(rows: Rows) -> Floats:
    """Earliest starts by row and microbatch, never falling along a row."""
    befores = _befores(rows)
    columns_held = _MACHINE_PASSES // max(rows.num_rows, 1)
    seconds, work = rows.seconds.tolist(), rows.share * rows.seconds
    first = rows.before[rows.rank].tolist()
    table = np.zeros((rows.num_rows, rows.shop.num_microbatches))
    # Scalars are read from lists, which is faster, and slices from the array.
    found: list[list[float]] = [[] for _ in seconds]
    for column in range(rows.shop.num_microbatches):
        for row in rows.sequence:
            needs, behind, machine = befores[row]
            earliest = found[row][-1] + seconds[row] if column else first[row]
            for needed, gap in needs:
                earliest = max(earliest, found[needed][column] + gap)
            for needed, shift in behind:
                if column >= shift:
                    earliest = max(earliest, found[needed][column - shift] + seconds[needed])
            if column < columns_held and len(machine) > 1:
                earliest = max(earliest, _machine(table, work, machine, column))
            found[row].append(earliest)
            table[row, column] = earliest
    return table


def _befores(rows: Rows) -> list[_Before]:
    demands = lags(rows)
    result = []
    for row in range(rows.num_rows):
        mine = rows.of_rank[int(rows.rank[row])]
        shifts = {other: 0 for other in mine if other != row and rows.precedes[other, row]} | {row: 1}
        for lag in demands:
            if rows.precedes[lag.row, row] and lag.needed in mine:
                for other in mine:
                    if rows.precedes[other, lag.needed]:
                        shifts[other] = min(shifts.get(other, lag.shift), lag.shift)
        result.append(
            _Before(
                [(need.needed, float(rows.seconds[need.needed]) + need.lag) for need in rows.needed_by[row]],
                [(lag.needed, lag.shift) for lag in demands if lag.row == row],
                list(shifts.items()),
            )
        )
    return result


def _machine(table: Floats, work: Floats, before: list[tuple[int, int]], column: int) -> float:
    """When a rank that does nothing but what must come before a pass can be done with that."""
    released, amounts = [], []
    for row, shift in before:
        last = column + 1 - shift
        if last > 0:
            part = table[row, max(last - _MACHINE_DEPTH, 0) : last]
            released.append(part)
            amounts.append(np.full(len(part), work[row]))
    if not released:
        return 0.0
    moments = np.concatenate(released)
    latest_first = np.argsort(-moments, kind="stable")
    return float((moments[latest_first] + np.cumsum(np.concatenate(amounts)[latest_first])).max())
