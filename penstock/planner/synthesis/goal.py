"""Goal: when a search may stop: at a length that nothing can beat, or when its effort is spent.

Effort is counted in passes placed, so that equal problems get equal answers on any machine. The clock is only a cap:
it ends a search on a machine so slow that the count alone would take far too long.
"""

from time import process_time

_PASSES_PER_SECOND = 150_000
"""passes that greedy runs place in a second of CPU"""
_SLACK = 3.0
"""how many times the seconds asked for may pass before the clock ends a search"""


class Goal:
    """A bound to reach, and an effort of so many CPU seconds to reach it."""

    def __init__(self, bound: float, seconds: float) -> None:
        self.bound, self.seconds = bound, seconds
        self.effort = self.left = seconds * _PASSES_PER_SECOND
        self.deadline = process_time() + _SLACK * seconds

    def part(self, share: float) -> "Goal":
        """The same bound, with a share of the effort."""
        return Goal(self.bound, share * self.seconds)

    def is_met(self, length: float) -> bool:
        """Whether a length is as good as any."""
        return length <= self.bound * (1 + 1e-8)

    def is_over(self, length: float) -> bool:
        """Whether to stop, for one reason or the other."""
        return self.is_met(length) or self.left <= 0 or process_time() > self.deadline

    def spend(self, passes: float) -> None:
        """Count passes as placed."""
        self.left -= passes

    def runs(self, part: float, passes: float, limits: tuple[int, int]) -> int:
        """How many runs of so many passes a part of the whole effort allows, within limits."""
        least, most = limits
        return int(min(max(part * self.effort / passes, least), most))
