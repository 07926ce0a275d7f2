"""RunOptions: how a Pipeline treats random numbers, numbers that are none, and ranks that do not answer."""

import math
from dataclasses import dataclass

from penstock.errors import RunError

NONFINITE = ("raise", "skip", "ignore")


@dataclass(frozen=True)
class RunOptions:
    """The choices of one Pipeline that have nothing to do with its model."""

    seed: int = 0
    """of the random numbers inside the model; they depend on it, the step, the microbatch and the block only"""
    nonfinite: str = "raise"
    """what happens when a loss or gradient is not a finite number: "raise", "skip" the step, or "ignore" it"""
    deadline_seconds: float = 60.0
    """how long a rank waits for another before it says why, once the first step is through"""
    check_inputs_every: int = 100
    """steps after which the ranks compare their batches; 0: never"""

    def __post_init__(self) -> None:
        if self.nonfinite not in NONFINITE:
            raise RunError("unknown nonfinite", given=repr(self.nonfinite), choices=NONFINITE)
        if not (math.isfinite(self.deadline_seconds) and self.deadline_seconds > 0):
            raise RunError("a deadline is seconds above 0", deadline_seconds=self.deadline_seconds)
        for name in ("seed", "check_inputs_every"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise RunError(f"{name} is a whole number, 0 or more", given=repr(getattr(self, name)))
