"""Fault: something that a rank is to do wrong on purpose, at a moment that is told in words.

`kill,rank=1,step=5,action=17` kills rank 1 as it notes its 17th action of step 5; `kill,rank=0,save=3` at the third
file that it opens, renames or removes for a checkpoint; `raise,rank=2,after=1.5` raises at what it does first 1.5
seconds after it began. Faults are for tests: they are refused unless the environment allows them.
"""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields

from penstock.errors import PenstockError

ALLOWED = "PENSTOCK_ALLOW_FAULTS"
KILL, ABORT, EXIT, RAISE, STOP, SLOW, FULL_DISK = "kill", "abort", "exit", "raise", "stop", "slow", "full-disk"
KINDS = {
    KILL: "end by SIGKILL",
    ABORT: "end by SIGABRT",
    EXIT: "leave without a word",
    RAISE: "raise an exception",
    STOP: "stand still, by SIGSTOP",
    SLOW: "sleep so many seconds before every action, from then on",
    FULL_DISK: "find no room on the disk for any checkpoint of that step",
}
"""what can be done, by its name"""
EVERY = "every"
_EXAMPLE = "kill,rank=1,step=5,action=3"
_SLOW_EXAMPLE = "slow,rank=1,step=5,seconds=0.1"


@dataclass(frozen=True)
class Fault:
    """What happens, to whom, and when."""

    kind: str
    rank: int = 0
    step: int | None = None
    """in which step, counted from 0; of a checkpoint, the number that it is named by"""
    action: int = 0
    """at which note of that step"""
    save: int | None = None
    """at which file operation of all checkpoints"""
    after: float | None = None
    """how many seconds after the rank began to train"""
    seconds: float = 0.0
    """how long a slow rank sleeps before every action"""
    life: int | None = 0
    """in which life of the run, counted from 0; None: in every one"""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PenstockError("unknown fault", given=repr(self.kind), known=", ".join(KINDS), hint=_EXAMPLE)
        if sum(moment is not None for moment in (self.step, self.save, self.after)) != 1:
            raise PenstockError("a fault has one moment: a step, a save, or seconds", given=self, hint=_EXAMPLE)
        if self.kind == FULL_DISK and self.step is None:
            hint = "full-disk,rank=1,step=100"
            raise PenstockError("a full disk needs the number of a checkpoint", given=self, hint=hint)
        numbers = (self.rank, self.step, self.action, self.save, self.after, self.seconds, self.life)
        if not all(value is None or 0 <= value < math.inf for value in numbers):
            raise PenstockError("the numbers of a fault are 0 or more", given=self, hint=_EXAMPLE)
        if (self.kind == SLOW) != (self.seconds > 0):
            raise PenstockError("a slow rank, and no other, needs seconds", given=self, hint=_SLOW_EXAMPLE)

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """The fault that a text tells."""
        kind, *pairs = text.split(",")
        given = dict(pair.partition("=")[::2] for pair in pairs)
        known = {field.name for field in fields(cls)} - {"kind"}
        if len(given) < len(pairs):
            raise PenstockError("a fault says something twice", given=text, hint=_EXAMPLE)
        if unknown := given.keys() - known:
            raise PenstockError("unknown words in a fault", given=text, words=", ".join(sorted(unknown)), hint=_EXAMPLE)
        return cls(kind, **{name: _number(text, name, value) for name, value in given.items()})  # type: ignore[arg-type]

    def is_in(self, rank: int, life: int) -> bool:
        """Whether it is for a rank in one of its lives."""
        return self.rank == rank and self.life in (None, life)


def allowed(texts: Iterable[str]) -> tuple[Fault, ...]:
    """The faults that texts tell; refused unless faults are allowed here."""
    faults = tuple(map(Fault.parse, texts))
    if faults and os.environ.get(ALLOWED) != "1":
        hint = f"{ALLOWED}=1 in the environment, if that is what you want"
        problem = "faults break a training on purpose, and are not allowed here"
        raise PenstockError(problem, faults=len(faults), hint=hint)
    return faults


def _number(text: str, name: str, value: str) -> int | float | None:
    if name == "life" and value == EVERY:
        return None
    try:
        return float(value) if name in ("after", "seconds") else int(value)
    except ValueError:
        raise PenstockError("a fault needs numbers", given=text, name=name, value=repr(value), hint=_EXAMPLE) from None
