"""The times of passes and messages if more ranks compute at a time than there are cores.

Ranks that compute at the same moment share the cores evenly, as processes on one machine do, so the length of a pass
depends on the others: an event simulation, from one event to the next, in which all running passes progress equally.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
_SAME_TIME = 1 + 1e-9
"""passes whose remaining seconds differ by less than this factor end together"""


class Message(NamedTuple):
    """A message: the pass after which it is sent (-1: at once), the pass that waits for it, and its link."""

    before_send: int
    user: int
    link: int
    seconds: float
    latency: float


class PassTimes(NamedTuple):
    """When every pass started and ended, and when every message arrived."""

    starts: Seconds
    ends: Seconds
    arrived: Seconds


def run_on_shared_cores(
    cores: int, rank_starts: Sequence[int], seconds: Sequence[float], messages: Sequence[Message]
) -> PassTimes | None:
    """Run passes to their end; None if they block. `rank_starts`: the first pass of each rank, then their number."""
    network = _Network(messages, len(seconds))
    starts, ends = _Machine(cores, rank_starts, seconds, network).run()
    return None if np.isnan(ends).any() else PassTimes(starts, ends, network.arrived)


class _Network:
    """Messages: sent after a pass, one after another on each link, and waited for by a pass."""

    def __init__(self, messages: Sequence[Message], num_passes: int) -> None:
        self._messages = messages
        self.arrived = np.zeros(len(messages))
        self.num_awaited = [0] * num_passes
        """per pass the number of messages that have not arrived yet"""
        self._sent_after: dict[int, list[int]] = {}
        self._link_is_free_at: dict[int, float] = {}
        self._in_transit: list[tuple[float, int]] = []
        """heap of (arrival, message)"""
        for number, message in enumerate(messages):
            self.num_awaited[message.user] += 1
            self._sent_after.setdefault(message.before_send, []).append(number)

    @property
    def next_arrival(self) -> float:
        """When the next message arrives; infinity if none is in transit."""
        return self._in_transit[0][0] if self._in_transit else math.inf

    def send(self, before_send: int, now: float) -> None:
        """Send the messages after a pass, as soon as their links are free."""
        for number in self._sent_after.get(before_send, ()):
            _, _, link, seconds, latency = self._messages[number]
            sent = max(now, self._link_is_free_at.get(link, 0.0)) + seconds
            self._link_is_free_at[link] = sent
            self.arrived[number] = sent + latency
            heapq.heappush(self._in_transit, (sent + latency, number))

    def deliver(self, now: float) -> None:
        """Mark the messages that have arrived by now."""
        while self.next_arrival <= now:
            _, number = heapq.heappop(self._in_transit)
            self.num_awaited[self._messages[number].user] -= 1


class _Machine:
    """Ranks that run their passes in order and share the cores evenly."""

    def __init__(self, cores: int, rank_starts: Sequence[int], seconds: Sequence[float], network: _Network) -> None:
        self._cores, self._seconds, self._network = cores, seconds, network
        self._left = [list(range(start, end))[::-1] for start, end in pairwise(rank_starts)]
        """per rank the passes that it has not started, the next one last"""
        self._running: dict[int, tuple[int, float]] = {}
        """by rank its running pass and the core seconds that the pass still needs"""
        self._times = np.full((2, len(seconds)), np.nan)
        self._now = 0.0

    def run(self) -> Seconds:
        """Starts and ends; NaN for passes that never run."""
        self._network.send(-1, 0.0)
        self._network.deliver(0.0)
        self._start_passes()
        while self._running or self._network.next_arrival < math.inf:
            self._advance()
            self._start_passes()
        return self._times

    def _start_passes(self) -> None:
        """Start the next pass of every rank that is free and has its messages."""
        for rank, left in enumerate(self._left):
            if left and rank not in self._running and not self._network.num_awaited[left[-1]]:
                number = left.pop()
                self._running[rank] = number, self._seconds[number]
                self._times[0, number] = self._now

    def _advance(self) -> None:
        """Advance to the next event: a message arrives, or a pass ends."""
        share = min(1.0, self._cores / max(len(self._running), 1))
        least = min((left for _, left in self._running.values()), default=math.inf)
        end, arrival = self._now + least / share, self._network.next_arrival
        progress, self._now = (min(end, arrival) - self._now) * share, min(end, arrival)
        # The pass nearest to its end ends now, even if rounding leaves a remainder.
        limit = least * _SAME_TIME if end <= arrival else -1.0
        for rank, (number, left) in list(self._running.items()):
            self._running[rank] = number, max(left - progress, 0.0)
            if left <= limit:
                del self._running[rank]
                self._times[1, number] = self._now
                self._network.send(number, self._now)
        self._network.deliver(self._now)
