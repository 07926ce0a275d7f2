"""Running ranks: under torchrun the links between the ranks that run are measured, and the first one plans for all."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cli.options import Example
from penstock.cli.plan import Wishes, planned
from penstock.errors import PlanError

if TYPE_CHECKING:
    from penstock.ir import Cluster, Plan


def is_rank() -> bool:
    """Whether this process is one of several that torchrun has started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


@dataclass(frozen=True)
class RunningRanks:
    """The ranks of a running group, where else a machine is described."""

    running: "Cluster"
    speed: None = None

    def cluster(self, ranks: int) -> "Cluster":
        """All that run, with the links between them; a number that was asked for must be theirs."""
        if ranks not in (Wishes.ranks, self.running.ranks):
            hint = f"--ranks {self.running.ranks}, or without"
            raise PlanError("other ranks run than are asked for", asked=ranks, running=self.running.ranks, hint=hint)
        return self.running


def planned_together(target: str, wishes: Wishes, example: Example, in_modules: bool = False) -> "Plan":
    """The plan for the ranks of the group that this process is in, on all of them; every one must call it."""
    from penstock.api.planning_together import plan_together

    return plan_together(lambda cluster: planned(target, wishes, RunningRanks(cluster), example, in_modules))


def planned_under_torchrun(target: str, wishes: Wishes, example: Example, in_modules: bool) -> "Plan | None":
    """The plan for the ranks that torchrun has started, on the first of them."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        found = planned_together(target, wishes, example, in_modules)
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()
