"""Walk: runs orders to their end, or to where they block; the one loop behind lowering, proof and simulation.

A *line* does its items one after another; an item may also need items of other lines. Ranks are lines of actions, links
are lines of messages. Every item is looked at once, plus once for each time its line waits for it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Walk:
    """When each item ended, and which item each unfinished line stands at.

    `ends` is -1 for items that never ran; `blocked` maps a line to (item it stands at, item it waits for).
    """

    ends: Seconds
    blocked: dict[int, tuple[int, int]]

    @property
    def finished(self) -> bool:
        """Whether every line reached its end."""
        return not self.blocked


class Needs(NamedTuple):
    """Per item the one item it needs, -1 for none, -2 for the several that `several` lists."""

    one: list[int]
    several: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, num_items: int, waiter: Indices, needed: Indices) -> "Needs":
        """The needs that pairs of (waiting item, needed item) say."""
        crowded = np.bincount(waiter, minlength=num_items) > 1
        one = np.full(num_items, -1, dtype=np.int64)
        one[waiter] = needed
        one[crowded] = -2
        rows = np.flatnonzero(crowded[waiter])
        rows = rows[np.argsort(waiter[rows], kind="stable")]
        items, first = np.unique(waiter[rows], return_index=True)
        groups, edges = needed[rows].tolist(), pairwise([*first.tolist(), len(rows)])
        several = {item: tuple(groups[low:high]) for item, (low, high) in zip(items.tolist(), edges, strict=True)}
        return cls(one.tolist(), several)


def walk(
    starts: Sequence[int], needs: Needs, seconds: Sequence[float] | None = None, tails: Sequence[float] | None = None
) -> Walk:
    """Run all lines as soon as possible. Line k holds the items starts[k] .. starts[k + 1].

    An item takes `seconds` of its line (0 if not given); what it made is there for others `tails` seconds later.
    """
    num_items, num_lines = starts[-1], len(starts) - 1
    one, several = needs
    seconds = seconds or [0.0] * num_items
    tails = tails or [0.0] * num_items
    ends = [-1.0] * num_items
    heads, clocks = list(starts[:-1]), [0.0] * num_lines
    waiting: dict[int, list[int]] = {}
    blocked: dict[int, tuple[int, int]] = {}
    # First come, first served: a line that waited finds more done when its turn comes, and blocks less often.
    runnable = deque(range(num_lines))
    while runnable:
        line = runnable.popleft()
        blocked.pop(line, None)
        now, item = clocks[line], heads[line]
        # Plain lists and no calls: this loop is where programs of a million actions spend their time.
        for item in range(item, starts[line + 1]):  # noqa: B020
            need, ready = one[item], 0.0
            if need >= 0:
                ready = ends[need]
            elif need == -2:
                for need in several[item]:
                    ready = ends[need]
                    if ready < 0.0:
                        break
                    if ready > now:
                        now = ready
            if ready < 0.0:
                waiting.setdefault(need, []).append(line)
                blocked[line] = (item, need)
                break
            if ready > now:
                now = ready
            now += seconds[item]
            ends[item] = now + tails[item]
            if item in waiting:
                runnable.extend(waiting.pop(item))
        heads[line], clocks[line] = item, now
    return Walk(np.asarray(ends), blocked)
