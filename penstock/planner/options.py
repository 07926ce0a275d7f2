"""The options of a plan."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from penstock.errors import PlanError
from penstock.ir import MAX_MICROBATCHES, MAX_STAGES, Cluster, Partition, Schedule, as_int, is_finite
from penstock.partitioners import find as find_partitioner
from penstock.schedules import find as find_schedule

RECOMPUTE = ("none", "full", "auto")
AUTO = "auto"


def _cli(metavar: str, text: str) -> dict[str, str]:
    """Metadata of a field: the placeholder and the help text that the command line shows."""
    return {"metavar": metavar, "help": text}


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan; those that are "auto" are searched for.

    In Python `ranks` may also be a Cluster (memory, slowness and links of the ranks), `schedule` a Schedule or the text
    of a CSV, and `partitioner` a Partition or lists of module names per stage. The metadata of a field has its `help`
    and `metavar` for the command line.
    """

    ranks: int | Cluster = field(default=4, metadata=_cli("P", "Pipeline ranks."))
    microbatches: int | str = field(default=AUTO, metadata=_cli("M", 'Microbatches per batch, or "auto".'))
    schedule: str | Path | Schedule = field(
        default=AUTO, metadata=_cli("NAME", 'A schedule, the CSV file of one, or "auto".')
    )
    partitioner: str | Partition | Sequence[Sequence[str]] = field(
        default=AUTO, metadata=_cli("NAME", 'A partitioner, or "auto".')
    )
    stages_per_rank: int | None = field(
        default=None, metadata=_cli("V", "Stages per rank; by default the best.")
    )
    memory: int | str | None = field(default=None, metadata=_cli("SIZE", "Memory of a rank, such as 24GiB."))
    recompute: str = field(
        default="none", metadata=_cli("WHICH", "Recompute activations: none, full, or auto (where memory requires it).")
    )
    budget_seconds: float = field(default=10.0, metadata=_cli("SECONDS", "How long to search for a better plan."))

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, Cluster):
            object.__setattr__(self, "ranks", _count("ranks", self.ranks, "ranks=4, or a penstock.Cluster"))
        if self.microbatches != AUTO:
            count = _count("microbatches", self.microbatches, 'microbatches=4, or "auto"')
            if count > MAX_MICROBATCHES:
                raise PlanError("too many microbatches", given=count, hint=f"at most {MAX_MICROBATCHES}")
            object.__setattr__(self, "microbatches", count)
        if self.recompute not in RECOMPUTE:
            hint = ", ".join(f'"{choice}"' for choice in RECOMPUTE)
            raise PlanError("unknown recompute", given=repr(self.recompute), hint=f"one of {hint}")
        if not is_finite(self.budget_seconds) or self.budget_seconds < 0:
            raise PlanError(
                "budget_seconds must be 0 or more", given=repr(self.budget_seconds), hint="budget_seconds=10.0"
            )
        self._check_depth()
        object.__setattr__(self, "schedule", _schedule(self.schedule))
        object.__setattr__(self, "partitioner", _partitioner(self.partitioner))

    def _check_depth(self) -> None:
        depth = self.stages_per_rank
        if depth is None:
            return
        if (as_int(depth) or 0) < 1:
            hint = "stages_per_rank=2, or None for the best number"
            raise PlanError("stages_per_rank must be a whole number, 1 or more", given=repr(depth), hint=hint)
        if depth * self.cluster.ranks > MAX_STAGES:
            raise PlanError(
                "too many stages",
                stages_per_rank=depth,
                ranks=self.cluster.ranks,
                hint=f"at most {MAX_STAGES} in all",
            )

    @cached_property
    def cluster(self) -> Cluster:
        """The ranks, with the memory that is given."""
        cluster = self.ranks if isinstance(self.ranks, Cluster) else Cluster(self.ranks)
        return cluster if self.memory is None else replace(cluster, memory=self.memory)

    def as_text(self, counts: Iterable[int]) -> tuple[tuple[str, str], ...]:
        """Returns the options as pairs that a plan stores, to compare those of two plans.

        `counts` are the numbers of microbatches that were searched.
        """
        return (
            ("number of microbatches", " or ".join(map(str, sorted(counts)))),
            ("schedule", self.schedule if isinstance(self.schedule, str) else _digest(self._orders)),
            ("stages", self.partitioner if isinstance(self.partitioner, str) else _digest(self._stages)),
            ("stages per rank", str(self.stages_per_rank)),
            ("recompute", self.recompute),
            ("ranks", str(self.cluster.ranks)),
            ("memory", str(self.cluster.memory)),
            ("slowness", str(self.cluster.slowness)),
        )

    @property
    def _orders(self) -> object:
        return self.schedule.orders if isinstance(self.schedule, Schedule) else self.schedule

    @property
    def _stages(self) -> tuple[tuple[str, ...], ...]:
        given = self.partitioner.stages if isinstance(self.partitioner, Partition) else self.partitioner
        return tuple(map(tuple, given))


def _count(name: str, given: object, hint: str) -> int:
    number = as_int(given) if not isinstance(given, str) else None
    if number is None or number < 1:
        raise PlanError(f"{name} must be a whole number, 1 or more", given=repr(given), hint=hint)
    return number


def _schedule(given: object) -> str | Schedule:
    """The name as in the table, or the schedule itself; a CSV is read."""
    if isinstance(given, Schedule):
        return given
    if isinstance(given, Path) or (isinstance(given, str) and (given.endswith(".csv") or "\n" in given)):
        return Schedule.from_csv(given)
    if not isinstance(given, str):
        hint = 'a name such as "1f1b", a Schedule, or the path of a CSV'
        raise PlanError("schedule must be a name or a Schedule", given=repr(given), hint=hint)
    return AUTO if given.lower() == AUTO else find_schedule(given).name


def _partitioner(given: object) -> str | Partition | Sequence[Sequence[str]]:
    """The name as in the table, or the stages themselves."""
    if isinstance(given, str):
        return find_partitioner(given).name
    if not isinstance(given, Partition | list | tuple) or not given:
        hint = 'a name such as "linear", a Partition, or a list of names of modules per stage'
        raise PlanError("partitioner must be a name or stages", given=repr(given), hint=hint)
    return given


def _digest(given: object) -> str:
    return f"given, {hashlib.sha256(repr(given).encode()).hexdigest()[:12]}"
