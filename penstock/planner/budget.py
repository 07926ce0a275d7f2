"""Budget: how much time is left to look for something better."""

import time
from collections.abc import Callable


class Budget:
    """Counts down from the moment it is made."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, 0 or more."""
        return max(0.0, self._end - time.monotonic())

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0.0

    def tell(self, hear: Callable[[int, int], None]) -> None:
        """Say how much is spent of how much, in thousandths of a second."""
        hear(round(1000 * (self._seconds - self.left)), round(1000 * self._seconds))
