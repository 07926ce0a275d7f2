"""The times of passes and messages if more ranks compute at a time than there are cores.

Ranks that compute at the same moment share the cores evenly, as processes on one machine do, so the length of a pass
depends on the others: an event simulation, from one event to the next, in which all running passes progress equally.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.ir import Floats

_SAME_TIME = 1 + 1e-9
"""passes whose remaining seconds differ by less than this factor end together"""


class Message(NamedTuple):
    """A message: the pass after which it is sent (-1: at once), the pass that waits for it, and its link."""

    before_send: int
    user: int
    link: int
    seconds: float
    """for which it occupies its link"""
    latency: float
    """seconds from the end of sending to the arrival"""


class PassTimes(NamedTuple):
    """When every pass started and ended, and when every message arrived."""

    starts: Floats
    ends: Floats
    arrived: Floats


def run_on_shared_cores(
    cores: int, rank_starts: Sequence[int], seconds: Sequence[float], messages: Sequence[Message]
) -> PassTimes | None:
    """Run passes to their end; None if they block. `rank_starts`: each rank's first pass, then the number of passes."""
    starts, ends = np.full((2, len(seconds)), np.nan)
    arrived = np.zeros(len(messages))
    sent_after: dict[int, list[int]] = defaultdict(list)
    num_awaited = [0] * len(seconds)
    for number, message in enumerate(messages):
        sent_after[message.before_send].append(number)
        num_awaited[message.user] += 1
    # By rank, the passes that have not started, the next one last.
    waiting = [list(range(first, end))[::-1] for first, end in pairwise(rank_starts)]
    # By rank, the running pass and the core seconds that it still needs.
    running: dict[int, tuple[int, float]] = {}
    link_is_free_at: dict[int, float] = defaultdict(float)
    # A heap of (arrival, message).
    in_transit: list[tuple[float, int]] = []
    now, ended = 0.0, [-1]
    while True:
        # The messages of passes that have just ended leave as soon as their links are free.
        for number in (number for each in ended for number in sent_after[each]):
            message = messages[number]
            sent = link_is_free_at[message.link] = max(now, link_is_free_at[message.link]) + message.seconds
            arrived[number] = sent + message.latency
            heapq.heappush(in_transit, (sent + message.latency, number))
        while in_transit and in_transit[0][0] <= now:
            num_awaited[messages[heapq.heappop(in_transit)[1]].user] -= 1
        # The next pass of every rank that is free and has its messages starts.
        for rank, passes in enumerate(waiting):
            if passes and rank not in running and not num_awaited[passes[-1]]:
                number = passes.pop()
                running[rank] = number, seconds[number]
                starts[number] = now
        if not running and not in_transit:
            return None if np.isnan(ends).any() else PassTimes(starts, ends, arrived)
        # The next event: a message arrives, or a pass ends.
        share = min(1.0, cores / max(len(running), 1))
        least = min((left for _, left in running.values()), default=math.inf)
        end, arrival = now + least / share, in_transit[0][0] if in_transit else math.inf
        progress, now = (min(end, arrival) - now) * share, min(end, arrival)
        # The pass nearest to its end ends now, even if rounding leaves a remainder.
        limit, ended = least * _SAME_TIME if end <= arrival else -1.0, []
        for rank, (number, left) in list(running.items()):
            running[rank] = number, max(left - progress, 0.0)
            if left <= limit:
                del running[rank]
                ends[number] = now
                ended.append(number)
