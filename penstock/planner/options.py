"""The options of a plan."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from penstock.errors import PlanError
from penstock.ir import (
    MAX_MICROBATCHES,
    MAX_STAGES,
    Cluster,
    Partition,
    Program,
    Schedule,
    TrainingState,
    as_int,
    choices_text,
    is_finite,
    read_schedule,
)
from penstock.partitioners import Division
from penstock.partitioners import find as find_partitioner
from penstock.passes import check_complete
from penstock.schedules import find as find_schedule

RECOMPUTE = ("none", "full", "auto")
AUTO = "auto"
ScheduleChoice = str | Path | Schedule | Program
"""a name, a Schedule, a Program, or a CSV file or its text; one with messages is run as it is"""
PartitionerChoice = str | Partition | Division | Sequence[Sequence[str]]
"""a name, a Partition, a Division with its placement, or lists of module names per stage"""


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan; those that are "auto" are searched for."""

    ranks: int | Cluster = 4
    """number of ranks, or a Cluster with their memory, slowness and links"""
    microbatches: int | str = AUTO
    """microbatches per batch"""
    schedule: ScheduleChoice = AUTO
    """the order of passes; stored as a name of the table, a Schedule or a Program"""
    partitioner: PartitionerChoice = AUTO
    """how the model is cut"""
    stages_per_rank: int | None = None
    """None: the best number"""
    memory: int | str | None = None
    """of a rank, in bytes or as text such as 24GiB"""
    recompute: str = "none"
    """one of "none", "full", or "auto": recompute activations where memory requires it"""
    budget_seconds: float = 10.0
    """seconds for the search; `penstock.plan` also measures within them"""
    training: TrainingState = TrainingState()
    """optimizer and precision, which count in memory"""
    shard_optimizer: bool = False
    """whether the replicas of the cluster shard the optimizer's state, as in ZeRO stage 1"""

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, Cluster):
            object.__setattr__(self, "ranks", _count("ranks", self.ranks, "ranks=4, or a penstock.Cluster"))
        if self.microbatches != AUTO:
            count = _count("microbatches", self.microbatches, 'microbatches=4, or "auto"')
            if count > MAX_MICROBATCHES:
                problem = f"microbatches must be at most {MAX_MICROBATCHES}"
                raise PlanError(problem, got=count, hint='microbatches="auto"')
            object.__setattr__(self, "microbatches", count)
        if self.recompute not in RECOMPUTE:
            problem = f"recompute must be {choices_text(RECOMPUTE)}"
            raise PlanError(problem, got=repr(self.recompute), hint='recompute="auto"')
        if not is_finite(self.budget_seconds) or self.budget_seconds < 0:
            raise PlanError(
                "budget_seconds must be 0 or more", got=repr(self.budget_seconds), hint="budget_seconds=10.0"
            )
        if self.stages_per_rank is not None:
            count = _count("stages_per_rank", self.stages_per_rank, "stages_per_rank=2, or None for the best number")
            if count * self.cluster.ranks > MAX_STAGES:
                sizes = {"stages_per_rank": count, "ranks": self.cluster.ranks}
                problem = f"all ranks together must have at most {MAX_STAGES} stages"
                raise PlanError(problem, **sizes, hint="a smaller stages_per_rank")
            object.__setattr__(self, "stages_per_rank", count)
        if self.shard_optimizer:
            # The search over devices replaces the cluster, and with it the number of shards.
            sharded = replace(self.training, optimizer_shards=self.cluster.replicas.count)
            object.__setattr__(self, "training", sharded)
        object.__setattr__(self, "schedule", _checked_schedule(self.schedule))
        object.__setattr__(self, "partitioner", _checked_partitioner(self.partitioner))

    @cached_property
    def cluster(self) -> Cluster:
        """The ranks, with the memory that is given."""
        cluster = self.ranks if isinstance(self.ranks, Cluster) else Cluster(self.ranks)
        return cluster if self.memory is None else replace(cluster, memory=self.memory)

    def as_text(self, counts: Iterable[int]) -> tuple[tuple[str, str], ...]:
        """Returns the options as pairs that a plan stores, to compare those of two plans.

        `counts` are the numbers of microbatches that were searched.
        """
        schedule, stages = self.schedule, self.partitioner
        if not isinstance(schedule, str):
            schedule = _digest(schedule.orders if isinstance(schedule, Schedule | Program) else schedule)
        if isinstance(stages, Division):
            stages = _digest((*stages.partition.stages, stages.placement.ranks))
        elif not isinstance(stages, str):
            stages = _digest(tuple(map(tuple, stages.stages if isinstance(stages, Partition) else stages)))
        return (
            ("number of microbatches", " or ".join(map(str, sorted(counts)))),
            ("schedule", schedule),
            ("stages", stages),
            ("stages per rank", str(self.stages_per_rank)),
            ("recompute", self.recompute),
            ("ranks", str(self.cluster.ranks)),
            ("memory", str(self.cluster.memory)),
            ("optimizer", self.training.optimizer),
            ("optimizer shards", str(self.training.optimizer_shards)),
            ("precision", str(self.training.precision)),
            ("slowness", str(self.cluster.slowness)),
        )


def _count(name: str, given: object, hint: str) -> int:
    """The option as an int, 1 or more."""
    number = as_int(given) if not isinstance(given, str) else None
    if number is None or number < 1:
        raise PlanError(f"{name} must be a whole number, 1 or more", got=repr(given), hint=hint)
    return number


def _checked_schedule(given: object) -> str | Schedule | Program:
    """The name as in the table, or the orders themselves, which must be complete; a CSV is read."""
    if isinstance(given, Path) or (isinstance(given, str) and (given.endswith(".csv") or "\n" in given)):
        given = read_schedule(given)
    if isinstance(given, Schedule | Program):
        check_complete(given)
        return given
    if not isinstance(given, str):
        hint = 'a name such as "1f1b", a Schedule, a Program, or the path of a CSV'
        raise PlanError("schedule must be a name or a Schedule", got=repr(given), hint=hint)
    return AUTO if given.lower() == AUTO else find_schedule(given).name


def _checked_partitioner(given: object) -> PartitionerChoice:
    """The name as in the table, or the stages themselves."""
    if isinstance(given, str):
        return find_partitioner(given).name
    if not isinstance(given, Partition | Division | list | tuple) or not given:
        hint = 'a name such as "linear", a Partition, a Division, or a list of names of modules per stage'
        raise PlanError("partitioner must be a name or stages", got=repr(given), hint=hint)
    return given


def _digest(given: object) -> str:
    """A short text that differs for different schedules or stages that the user gave."""
    return f"given, {hashlib.sha256(repr(given).encode()).hexdigest()[:12]}"
