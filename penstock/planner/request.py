"""Request: what the user asks of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import PlanError
from penstock.ir.cluster import Cluster
from penstock.ir.figures import whole
from penstock.ir.partition import Partition
from penstock.ir.schedule import Schedule

RECOMPUTE = ("none", "full", "auto")
AUTO = "auto"


@dataclass(frozen=True)
class Request:
    """The choices that are given, and "auto" where the planner is to choose."""

    cluster: Cluster
    microbatches: int
    schedule: str | Schedule = AUTO
    """a name of the table, or the order itself"""
    partitioner: str | Partition | Sequence[Sequence[str]] = AUTO
    """a name of the table, the stages themselves, or lists of module names per stage"""
    stages_per_rank: int | None = None
    """None: what the schedule wants"""
    recompute: str = "none"
    """whether activations are computed again in the backward: "none", "full", or "auto": where memory demands it"""
    memory: tuple[int, ...] = field(default=())
    """bytes that a plan may use, per rank; empty: no limit"""

    def __post_init__(self) -> None:
        count = whole(self.microbatches)
        if count is None or count < 1:
            raise PlanError("the number of microbatches must be 1 or more", microbatches=repr(self.microbatches))
        if self.recompute not in RECOMPUTE:
            raise PlanError("unknown recompute", given=repr(self.recompute), choices=RECOMPUTE)
