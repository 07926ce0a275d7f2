"""The contract of a schedule, and helpers to build orders."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.errors import CostError, ScheduleError
from penstock.ir import (
    MAX_ACTIONS,
    MAX_MICROBATCHES,
    MAX_STAGES,
    Codes,
    Ints,
    Kind,
    Schedule,
    StageCosts,
    as_int,
    is_count,
    kind_of,
    pack,
)
from penstock.schedules.weight_filling import move_weight_grads


@dataclass(frozen=True)
class Scheduler(ABC):
    """Builds the orders of all ranks; its fields are its options."""

    name: ClassVar[str]
    splits_backward: ClassVar[bool] = False
    """whether weight gradients are passes of their own, which measured costs may then move into gaps"""
    allowed_stages_per_rank: ClassVar[tuple[int, ...]] = ()
    """empty: any number"""
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        # A value that is not an integer is refused in __call__, where the error names the schedule.
        object.__setattr__(self, "stages_per_rank", _plain(self.stages_per_rank))

    def __call__(self, ranks: int, microbatches: int, costs: StageCosts | None = None) -> Schedule:
        """The schedule; with costs and a split backward, weight gradients are moved into gaps if that is faster."""
        ranks, microbatches = _plain(ranks), _plain(microbatches)
        self._check(ranks, microbatches)
        stages = ranks * self.stages_per_rank
        if costs is not None and costs.num_stages != stages:
            raise CostError("costs must have the same number of stages", costs=costs.num_stages, schedule=stages)
        schedule = self.build(ranks, microbatches)
        if costs is None or not self.splits_backward:
            return schedule
        return move_weight_grads(schedule, costs)

    @abstractmethod
    def build(self, ranks: int, microbatches: int) -> Schedule:
        """The schedule for passes of equal length, for any ranks >= 1 and microbatches >= 1."""

    def _check(self, ranks: int, microbatches: int) -> None:
        """Raise ScheduleError for sizes that are not whole numbers, not supported by the schedule, or too large."""
        for name, value in (
            ("ranks", ranks),
            ("microbatches", microbatches),
            ("stages_per_rank", self.stages_per_rank),
        ):
            if not is_count(value):
                raise ScheduleError(
                    f"{name} must be a whole number, 1 or more", schedule=self.name, **{name: repr(value)}
                )
        allowed = self.allowed_stages_per_rank
        if allowed and self.stages_per_rank not in allowed:
            raise ScheduleError(
                f"stages_per_rank must be {' or '.join(map(str, allowed))} for this schedule",
                schedule=self.name,
                stages_per_rank=self.stages_per_rank,
                hint=f"stages_per_rank={allowed[0]}, or interleaved, looped_bfs or interleaved_zb, which take any",
            )
        stages, kinds = ranks * self.stages_per_rank, 3 if self.splits_backward else 2
        if stages > MAX_STAGES or microbatches > MAX_MICROBATCHES or kinds * stages * microbatches > MAX_ACTIONS:
            raise ScheduleError(
                "stages, microbatches and passes must be at most the limits",
                stages=stages,
                microbatches=microbatches,
                passes=kinds * stages * microbatches,
                limits=(MAX_STAGES, MAX_MICROBATCHES, MAX_ACTIONS),
            )


def _plain(value: int) -> int:
    """Integers of numpy as int; anything else unchanged."""
    return value if (number := as_int(value)) is None else number


def staggered(*columns: tuple[Codes, int]) -> Codes:
    """Interleave sequences that each start at their own step; a step takes one action of each, left to right."""
    steps = max(len(codes) + delay for codes, delay in columns)
    grid = np.full((steps, len(columns)), -1, dtype=np.int64)
    for column, (codes, delay) in enumerate(columns):
        grid[delay : delay + len(codes), column] = codes
    return grid[grid >= 0]


def passes(kind: Kind, stages: int | Ints, microbatches: int | Ints) -> Codes:
    """Passes of one kind; an int for microbatches means all of them in ascending order."""
    return pack(kind, stages, np.arange(microbatches) if isinstance(microbatches, int) else microbatches)


def weight_grads_of(input_grads: Codes) -> Codes:
    """The weight gradients that belong to input gradients."""
    return input_grads - kind_of(input_grads) + Kind.WEIGHT_GRAD
