"""Decides whether a run whose ranks failed is restarted; the caller starts the processes."""

from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import RunError

_STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")
"""signals that end a rank on request"""


@dataclass(frozen=True)
class RestartPolicy:
    """How many failures a run survives."""

    restarts: int = 3
    min_ranks: int | None = None
    """minimum ranks to continue with once a rank fails permanently; None: all ranks are needed"""
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 30.0


class RankFailure(NamedTuple):
    """The failure of an attempt. The same failure twice in a row means that another attempt would fail as well."""

    rank: int | None
    step: str
    action: str
    summary: str
    is_sudden: bool
    """whether the process ended without reporting an error"""
    is_requested: bool
    """whether the rank was stopped on request"""
    is_final: bool = False
    """whether the rank itself ruled out another attempt"""

    @classmethod
    def of(cls, error: RunError) -> "RankFailure":
        """The failure described by an error of `launch`."""
        values = error.values
        signal = str(values.get("signal", ""))
        rank = values.get("rank")
        return cls(
            rank=rank if isinstance(rank, int) else None,
            step=str(values.get("step", "")),
            action=str(values.get("action", "")),
            summary=error.rank_summary or f"{error.problem} {signal}".strip(),
            is_sudden="signal" in values or "exit_code" in values,
            is_requested=signal in _STOP_SIGNALS,
            is_final=error.is_final,
        )

    def repeats(self, last: "RankFailure | None") -> bool:
        """Whether this failure is the same as the last one."""
        if last is None or self.is_sudden:
            return self == last
        # An exception that all ranks raise is reported by one of them, each time another one.
        return (self.step, self.summary) == (last.step, last.summary)


class RestartDecision(NamedTuple):
    """Another attempt after a pause, or the reason not to restart."""

    ranks: int
    pause_seconds: float = 0.0
    end: str = ""
    """why the run is not restarted; empty if it is, or if its policy allows no restart at all"""


class RestartController:
    """Decides after every failure of one run whether to restart it, and on how many ranks."""

    def __init__(self, policy: RestartPolicy, ranks: int) -> None:
        self._policy, self._ranks = policy, ranks
        self._last: RankFailure | None = None
        self._newest: int | None = None
        """the step of the newest checkpoint at the last failure"""
        self._num_without_progress = 0
        self.restarts = 0
        """number of restarts so far"""

    def decide(self, failure: RankFailure, newest: int | None) -> RestartDecision:
        """Decide whether to restart after a failure; `newest` is the step of the newest checkpoint."""
        if not failure.step:  # it failed before its first step
            failure = failure._replace(step=str(newest or 0))
        last, self._last = self._last, failure
        is_stuck = newest == self._newest and last is not None
        self._num_without_progress = self._num_without_progress + 1 if is_stuck else 0
        self._newest = newest
        if failure.is_requested:
            return RestartDecision(self._ranks, end="a stop was requested")
        if failure.is_final:
            return RestartDecision(self._ranks, end="another attempt would fail the same way")
        if self.restarts >= self._policy.restarts:
            reason = f"already restarted {self.restarts} times, the limit of --restarts" if self.restarts else ""
            return RestartDecision(self._ranks, end=reason)
        fewest = self._policy.min_ranks
        dies_again = last is not None and last.is_sudden and failure.is_sudden and last.rank == failure.rank
        if dies_again and fewest is not None and self._ranks > fewest:
            # The same rank died suddenly twice in a row: its device or host is broken, so continue without it.
            self._ranks -= 1
            self._last = None  # ranks are renumbered, so failures before and after do not compare
        elif failure.repeats(last):
            return RestartDecision(self._ranks, end="the same error occurred twice at the same step")
        self.restarts += 1
        # Exponential backoff until there is a newer checkpoint.
        pause = self._policy.first_pause_seconds * 2.0 ** min(self._num_without_progress, 30)
        return RestartDecision(self._ranks, min(pause, self._policy.longest_pause_seconds))
