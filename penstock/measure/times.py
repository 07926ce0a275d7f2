"""Times: seconds of the four passes of a node."""

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from penstock.measure.clock import typical

_LEAST = 0.05
"""of a time is left, whatever is taken off: both are known only so well"""


class Times(NamedTuple):
    """Seconds of the four passes; a full backward is no sum of its two parts."""

    forward: float = 0.0
    backward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    @property
    def step(self) -> float:
        """Forward and full backward."""
        return self.forward + self.backward

    def without(self, other: "Times") -> "Times":
        """What is left without the time that running takes by itself; something is left of what takes any time."""
        return Times(*(max(mine - theirs, _LEAST * mine) for mine, theirs in zip(self, other, strict=True)))

    def scaled(self, forward: float, backward: float) -> "Times":
        """Times a factor for the forward and one for all backwards."""
        return Times(self.forward * forward, *(seconds * backward for seconds in self[1:]))

    @classmethod
    def typical(cls, samples: Iterable["Times"]) -> "Times":
        """The typical of each pass."""
        return cls(*map(typical, zip(*samples, strict=True)))

    @classmethod
    def median(cls, samples: Iterable["Times"]) -> "Times":
        """The median of each pass."""
        return cls(*map(median, zip(*samples, strict=True)))
