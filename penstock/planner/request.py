"""Request: what the user asks of a plan."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.ir import MAX_STAGES, Cluster, Partition, Schedule, as_int, is_finite
from penstock.partitioners import find as find_partitioner
from penstock.schedules import find as find_schedule

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
            ("slowness", str(self.cluster.slowness)),
        )

    @property
    def _stages(self) -> tuple[tuple[str, ...], ...]:
        given = self.partitioner.stages if isinstance(self.partitioner, Partition) else self.partitioner
        return tuple(map(tuple, given))

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            hint = ", ".join(f'"{choice}"' for choice in RECOMPUTE)
            raise PlanError("unknown recompute", given=repr(self.recompute), hint=f"one of {hint}")
        if not is_finite(self.budget_seconds) or self.budget_seconds < 0:
            hint = "budget_seconds=10.0"
            raise PlanError("the budget is seconds, 0 or more", budget_seconds=repr(self.budget_seconds), hint=hint)
        self._check_depth()
        object.__setattr__(self, "schedule", _schedule(self.schedule))
        object.__setattr__(self, "partitioner", _partitioner(self.partitioner))

    def _check_depth(self) -> None:
        depth = self.stages_per_rank
        if depth is None:
            return
        if (as_int(depth) or 0) < 1:
            hint = "stages_per_rank=2, or None for what suits"
            raise PlanError("stages per rank are a whole number, 1 or more", stages_per_rank=repr(depth), hint=hint)
        if depth * self.cluster.ranks > MAX_STAGES:
            raise PlanError(
                "too many stages",
                stages_per_rank=depth,
                ranks=self.cluster.ranks,
                hint=f"at most {MAX_STAGES} in all",
            )


def _schedule(given: object) -> str | Schedule:
    """The name as it stands in the table, or the order itself."""
    if isinstance(given, Schedule):
        return given
    if not isinstance(given, str):
        hint = 'a name such as "1f1b", a Schedule, or the path of a CSV'
        raise PlanError("no schedule", given=repr(given), hint=hint)
    return AUTO if given.lower() == AUTO else find_schedule(given).name


def _partitioner(given: object) -> str | Partition | Sequence[Sequence[str]]:
    """The name as it stands in the table, or the stages themselves."""
    if isinstance(given, str):
        return find_partitioner(given).name
    if not isinstance(given, Partition | list | tuple) or not given:
        hint = 'a name such as "linear", a Partition, or a list of names of modules per stage'
        raise PlanError("no partitioner", given=repr(given), hint=hint)
    return given


def _digest(given: object) -> str:
    return f"given, {hashlib.sha256(repr(given).encode()).hexdigest()[:12]}"
