"""Problem: what an order is wanted for."""

from dataclasses import dataclass

from penstock.errors import CostError, ScheduleError
from penstock.ir import MAX_MICROBATCHES, Cluster, Cuts, Placement, StageCosts, as_int

OBJECTIVES = ("makespan", "span")


@dataclass(frozen=True)
class Problem:
    """Stages with costs, on ranks with memory and links; an order of their passes is sought.

    `objective` is what is to be short: the makespan of a step, or its span, the measure of the zero-bubble papers.
    """

    costs: StageCosts
    placement: Placement
    num_microbatches: int
    cluster: Cluster
    cuts: Cuts
    objective: str = "makespan"

    def __post_init__(self) -> None:
        if not 1 <= (as_int(self.num_microbatches) or 0) <= MAX_MICROBATCHES:
            raise ScheduleError("microbatches out of range", microbatches=repr(self.num_microbatches))
        if self.objective not in OBJECTIVES:
            raise ScheduleError("unknown objective", objective=repr(self.objective), hint=f"one of {OBJECTIVES}")
        stages = {"costs": self.costs.num_stages, "placement": self.placement.num_stages, "cuts": self.cuts.num_stages}
        if len(set(stages.values())) > 1:
            raise CostError("costs, placement and cuts differ in the number of stages", hint="", **stages)
        if self.cluster.ranks != self.placement.num_ranks:
            raise CostError(
                "the cluster has another number of ranks",
                cluster=self.cluster.ranks,
                placement=self.placement.num_ranks,
            )

    @classmethod
    def of(
        cls, costs: StageCosts, placement: Placement, num_microbatches: int, cluster: Cluster | None = None
    ) -> "Problem":
        """The usual case: a chain of stages, and without a cluster neither limits nor time for messages."""
        cluster = cluster or Cluster(placement.num_ranks)
        return cls(costs, placement, num_microbatches, cluster, Cuts.chain(placement.num_stages))

    @property
    def num_passes(self) -> int:
        """How many passes an order has if every backward is split."""
        return 3 * self.placement.num_stages * self.num_microbatches

    @property
    def room(self) -> tuple[float, ...]:
        """Bytes per rank that activations may take: its memory less the state of its stages; inf without a limit."""
        limits = self.cluster.limits or (float("inf"),) * self.placement.num_ranks
        return tuple(
            limit - sum(self.costs.state[stage].total for stage in stages)
            for limit, stages in zip(limits, self.placement.stages, strict=True)
        )
