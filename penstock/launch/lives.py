"""Lives: what ended the earlier attempts at a run, and whether another one makes sense; decisions only."""

from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import RunError

_ASKED = ("SIGTERM", "SIGINT", "SIGHUP")
"""deaths that somebody wished for"""


@dataclass(frozen=True)
class Endurance:
    """How much a run takes before it is given up."""

    restarts: int = 3
    min_ranks: int | None = None
    """with how few ranks it may go on once one is gone for good; None: only with all"""
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 30.0


class Death(NamedTuple):
    """How a life ended; the same twice means that it would end so every time."""

    rank: int | None
    step: str
    action: str
    summary: str
    is_sudden: bool
    """whether the rank ended without a word"""
    is_wished: bool
    is_final: bool = False
    """whether the rank decided that it is over"""

    @classmethod
    def of(cls, error: RunError) -> "Death":
        """The death that an error of a launch tells."""
        values = error.values
        signal = str(values.get("signal", ""))
        rank = values.get("rank")
        return cls(
            rank if isinstance(rank, int) else None,
            str(values.get("step", "")),
            str(values.get("action", "")),
            error.rank_summary or f"{error.problem} {signal}".strip(),
            "signal" in values or "exit_code" in values,
            signal in _ASKED,
            error.is_final,
        )

    def is_again(self, last: "Death | None") -> bool:
        """Whether it is the last one over again. What all ranks raise is told by one of them, each time another."""
        if last is None or self.is_sudden:
            return self == last
        return (self.step, self.summary) == (last.step, last.summary)


class Next(NamedTuple):
    """What follows a death: another life after a pause, or the end and why."""

    ranks: int
    pause_seconds: float = 0.0
    end: str = ""
    """why there is no other life; empty if there is"""


class Lives:
    """All lives of a run so far."""

    def __init__(self, endurance: Endurance, ranks: int) -> None:
        self._endurance, self._ranks = endurance, ranks
        self._last: Death | None = None
        self._newest: int | None = None
        self._num_idle = 0
        self.restarts = 0
        """how many lives have followed the first one"""

    def after(self, death: Death, newest: int | None) -> Next:
        """What follows a death, if `newest` is the step of the newest checkpoint by now."""
        if not death.step:
            death = death._replace(step=str(newest or 0))  # it broke before its first step
        last, self._last = self._last, death
        self._num_idle = self._num_idle + 1 if newest == self._newest and last is not None else 0
        self._newest = newest
        if death.is_wished:
            return Next(self._ranks, end="it was asked to stop")
        if death.is_final:
            return Next(self._ranks, end="it would come to the same")
        if self.restarts >= self._endurance.restarts:
            return Next(self._ranks, end=self._used_up())
        if self._is_gone_for_good(death, last):
            self._ranks -= 1
            self._last = None
        elif death.is_again(last):
            return Next(self._ranks, end="the same error came twice at the same step, and would come again")
        self.restarts += 1
        pause = self._endurance.first_pause_seconds * 2.0 ** min(self._num_idle, 30)
        return Next(self._ranks, min(pause, self._endurance.longest_pause_seconds))

    def _is_gone_for_good(self, death: Death, last: Death | None) -> bool:
        """Whether the same rank has ended without a word twice in a row, and the others may go on."""
        fewest = self._endurance.min_ranks
        is_same = last is not None and last.is_sudden and death.is_sudden and last.rank == death.rank
        return is_same and fewest is not None and self._ranks > fewest

    def _used_up(self) -> str:
        if not self.restarts:
            return ""
        return f"it was restarted {self.restarts} times, which is as often as --restarts allows"
