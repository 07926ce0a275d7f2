"""Shared cores: when passes end and messages arrive if more ranks compute at a time than there are cores.

Ranks that compute at the same moment share the cores evenly, as processes on one machine do, so a pass has no length of
its own: time goes on from one event to the next, and in between every pass that runs comes nearer to its end.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
_ALIKE = 1 + 1e-9
"""passes that differ by less end together"""


class Mail(NamedTuple):
    """A message: the pass after which it leaves (-1: at once), the pass that waits for it, and its link."""

    above: int
    user: int
    link: int
    seconds: float
    latency: float


class Happened(NamedTuple):
    """When every pass started and ended, and when every message arrived."""

    starts: Seconds
    ends: Seconds
    arrived: Seconds


def run_on(cores: int, lines: Sequence[int], seconds: Sequence[float], mail: Sequence[Mail]) -> Happened | None:
    """Run passes to their end; None if they block. `lines` are where those of each rank begin, and their number."""
    post = _Post(mail, len(seconds))
    machine = _Machine(cores, lines, seconds, post)
    starts, ends = machine.run()
    return None if np.isnan(ends).any() else Happened(starts, ends, post.arrived)


class _Post:
    """Messages: they leave after a pass, one after another on each link, and are waited for."""

    def __init__(self, mail: Sequence[Mail], num_passes: int) -> None:
        self._mail = mail
        self.arrived = np.zeros(len(mail))
        self.num_awaited = [0] * num_passes
        """per pass how many messages have still to come"""
        self._leaving: dict[int, list[int]] = {}
        self._link_is_free_at: dict[int, float] = {}
        self._under_way: list[tuple[float, int]] = []
        for number, message in enumerate(mail):
            self.num_awaited[message.user] += 1
            self._leaving.setdefault(message.above, []).append(number)

    @property
    def next_arrival(self) -> float:
        """When the next message comes; infinity if none is under way."""
        return self._under_way[0][0] if self._under_way else math.inf

    def send(self, above: int, now: float) -> None:
        """The messages below a pass leave, as soon as their links are free."""
        for number in self._leaving.get(above, ()):
            _, _, link, seconds, latency = self._mail[number]
            sent = max(now, self._link_is_free_at.get(link, 0.0)) + seconds
            self._link_is_free_at[link] = sent
            self.arrived[number] = sent + latency
            heapq.heappush(self._under_way, (sent + latency, number))

    def deliver(self, now: float) -> None:
        """What has come by now is no longer waited for."""
        while self.next_arrival <= now:
            _, number = heapq.heappop(self._under_way)
            self.num_awaited[self._mail[number].user] -= 1


class _Machine:
    """Ranks that compute, each its passes in order, and share the cores evenly."""

    def __init__(self, cores: int, lines: Sequence[int], seconds: Sequence[float], post: _Post) -> None:
        self._cores, self._seconds, self._post = cores, seconds, post
        self._left = [list(range(start, end))[::-1] for start, end in pairwise(lines)]
        """per rank the passes that it has not begun, the next one last"""
        self._running: dict[int, tuple[int, float]] = {}
        """by rank its pass, and the seconds of a whole core that this still needs"""
        self._times = np.full((2, len(seconds)), np.nan)
        self._now = 0.0

    def run(self) -> Seconds:
        """Starts and ends; not a number for passes that are never run."""
        self._post.send(-1, 0.0)
        self._post.deliver(0.0)
        self._begin()
        while self._running or self._post.next_arrival < math.inf:
            self._advance()
            self._begin()
        return self._times

    def _begin(self) -> None:
        """Every rank that can starts its next pass."""
        for rank, left in enumerate(self._left):
            if left and rank not in self._running and not self._post.num_awaited[left[-1]]:
                number = left.pop()
                self._running[rank] = number, self._seconds[number]
                self._times[0, number] = self._now

    def _advance(self) -> None:
        """Go on to the next event: a message that comes, or the end of a pass."""
        share = min(1.0, self._cores / max(len(self._running), 1))
        least = min((left for _, left in self._running.values()), default=math.inf)
        end, arrival = self._now + least / share, self._post.next_arrival
        gone, self._now = (min(end, arrival) - self._now) * share, min(end, arrival)
        # What is nearest to its end reaches it, whatever rounding makes of the difference.
        limit = least * _ALIKE if end <= arrival else -1.0
        for rank, (number, left) in list(self._running.items()):
            self._running[rank] = number, max(left - gone, 0.0)
            if left <= limit:
                del self._running[rank]
                self._times[1, number] = self._now
                self._post.send(number, self._now)
        self._post.deliver(self._now)
