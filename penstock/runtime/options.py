"""RunOptions: how a Pipeline treats random numbers, numbers that are none, and ranks that do not answer."""

from dataclasses import dataclass

from penstock.errors import RunError
from penstock.ir import as_int, is_finite

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

    restore_gradients: bool = True
    """whether a step that fails leaves the gradients as they were before it; while several steps accumulate that takes
    the memory of one more set of gradients. Without it such a step drops all gradients"""

    def __post_init__(self) -> None:
        if self.nonfinite not in NONFINITE:
            hint = " or ".join(f'"{choice}"' for choice in NONFINITE)
            raise RunError("unknown nonfinite", given=repr(self.nonfinite), hint=hint)
        if not (is_finite(self.deadline_seconds) and self.deadline_seconds > 0):
            raise RunError("a deadline is seconds above 0", deadline_seconds=repr(self.deadline_seconds), hint="60.0")
        for name, value in (("seed", self.seed), ("check_inputs_every", self.check_inputs_every)):
            number = as_int(value)
            if number is None or number < 0:
                raise RunError(f"{name} is a whole number, 0 or more", given=repr(value))
        if not isinstance(self.restore_gradients, bool):
            raise RunError("restore_gradients is True or False", given=repr(self.restore_gradients))
