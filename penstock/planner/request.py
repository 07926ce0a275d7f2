"""Request: what the user asks of a plan."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.ir.cluster import Cluster
from penstock.ir.figures import is_finite
from penstock.ir.partition import Partition
from penstock.ir.schedule import Schedule

RECOMPUTE = ("none", "full", "auto")
AUTO = "auto"
DEFAULT_BUDGET = 10.0


@dataclass(frozen=True)
class Request:
    """The choices that are given, and "auto" where the planner is to choose; the cluster says what must be kept."""

    cluster: Cluster
    schedule: str | Schedule = AUTO
    """a name of the table, or the order itself"""
    partitioner: str | Partition | Sequence[Sequence[str]] = AUTO
    """a name of the table, the stages themselves, or lists of module names per stage"""
    stages_per_rank: int | None = None
    """None: what the schedule wants, or what is best"""
    recompute: str = "none"
    """whether activations are computed again in the backward: "none", "full", or "auto": where memory demands it"""
    budget_seconds: float = DEFAULT_BUDGET
    """how long to look for something better; what is being looked at is finished"""

    def words(self, counts: Iterable[int]) -> tuple[tuple[str, str], ...]:
        """What is asked for, for the given numbers of microbatches, so that two requests can be compared."""
        return (
            ("number of microbatches", " or ".join(map(str, sorted(counts)))),
            ("schedule", self.schedule if isinstance(self.schedule, str) else _digest(self.schedule.orders)),
            ("stages", self.partitioner if isinstance(self.partitioner, str) else _digest(self._stages)),
            ("stages per rank", str(self.stages_per_rank)),
            ("recompute", self.recompute),
            ("ranks", str(self.cluster.ranks)),
            ("memory", str(self.cluster.memory)),
        )

    @property
    def _stages(self) -> tuple[tuple[str, ...], ...]:
        given = self.partitioner.stages if isinstance(self.partitioner, Partition) else self.partitioner
        return tuple(map(tuple, given))

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise PlanError("unknown recompute", given=repr(self.recompute), choices=RECOMPUTE)
        if not is_finite(self.budget_seconds) or self.budget_seconds < 0:
            raise PlanError("the budget is seconds, 0 or more", budget_seconds=repr(self.budget_seconds))


def _digest(given: object) -> str:
    return f"given, {hashlib.sha256(repr(given).encode()).hexdigest()[:12]}"
