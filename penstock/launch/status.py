"""Status: what one rank was last seen doing, and its most recent actions."""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Action, decode
from penstock.launch.liveness import ELSEWHERE

ABSENT, STARTED, IDLE, PREPARING, MEETING, WORKING, WAITING, ENDED, FAILED = (
    "absent",
    "started",
    "idle",
    "preparing",
    "meeting",
    "working",
    "waiting",
    "ended",
    "failed",
)
BUSY = (PREPARING, MEETING, WORKING, WAITING)
"""states inside a step or another call: a rank that is gone in one of them did not end as it should"""
OCCASIONS = (
    ("step", "the beginning of step {step}"),
    ("the end of step", "the end of step {step}"),
    ("eval", "eval before step {step}"),
    ("the end of eval", "the end of eval before step {step}"),
    ("the form of a batch", "what follows from the batch of step {step}"),
    ("clip_grad_norm_", "clip_grad_norm_ before step {step}"),
    ("unscale_", "unscale_ of the scaler before step {step}"),
    ("largest", "the comparison of values before step {step}"),
    ("full_state_dict", "full_state_dict before step {step}"),
    ("save", "the saving of a checkpoint before step {step}"),
    ("load", "the loading of a checkpoint before step {step}"),
    ("wait_for_save", "wait_for_save before step {step}"),
    ("Pipeline", "the making of a Pipeline"),
)
"""what all ranks meet for, each with the words for it in a report"""


@dataclass(frozen=True)
class Moment:
    """One note of a rank on its board."""

    state: str
    """`started`, `idle` between two steps, `preparing` one, `working` on an action, `waiting` for a message, `meeting`
    all other ranks, or `ended`."""
    step: int = 0
    code: int | None = None
    """The action in its compact form; of a meeting, its place among the occasions."""
    peer: int | None = None
    """The rank whose message is waited for."""
    since: float = 0.0
    """When it began, in seconds of the clock that all processes of a host share (`time.monotonic`)."""

    @property
    def action(self) -> str:
        """The action as text, empty where there is none."""
        if self.code is None or self.state == MEETING:
            return ""
        known = action_of(self.code)
        return f"code {self.code}" if known is None else str(known)

    @property
    def occasion(self) -> str:
        """What all ranks meet for, empty outside of a meeting."""
        if self.state != MEETING or self.code is None:
            return ""
        known = 0 <= self.code < len(OCCASIONS)
        return (OCCASIONS[self.code][1] if known else "a call before step {step}").format(step=self.step)


@dataclass(frozen=True)
class Status:
    """All that the board tells about one rank; it can be read while the rank runs and after it has died."""

    rank: int
    pid: int = 0
    process: str = ELSEWHERE
    """`running`, `stopped`, `gone`, or `elsewhere`: not a process of this host."""
    recent: tuple[Moment, ...] = ()
    """The last notes, oldest first; the last one is what the rank is doing now."""
    failure: str = ""
    """The JSON text of what broke here, empty if nothing did."""

    @property
    def now(self) -> Moment:
        """The last note; `absent` if the rank has not made any."""
        return self.recent[-1] if self.recent else Moment(ABSENT)

    @property
    def state(self) -> str:
        """`failed`, or the state of the last note."""
        return FAILED if self.failure else self.now.state

    @property
    def step(self) -> int:
        """The step of the last note."""
        return self.now.step

    @property
    def action(self) -> str:
        """The action of the last note as text."""
        return self.now.action

    @property
    def peer(self) -> int | None:
        """The rank whose message is waited for."""
        return self.now.peer

    @property
    def since(self) -> float:
        """When the last note was made, in seconds of `time.monotonic`."""
        return self.now.since


def occasion_code(name: str) -> int:
    """The place of an occasion in the table; behind it for one that is not there."""
    return next((place for place, (known, _) in enumerate(OCCASIONS) if known == name), len(OCCASIONS))


def action_of(code: int) -> Action | None:
    """The action of a code, None for a number that is no action."""
    try:
        return decode(np.array([code], dtype=np.int64))[0]
    except ValueError:
        return None
