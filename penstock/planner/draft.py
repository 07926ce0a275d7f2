"""Draft: a plan without its order: the cuts, where the stages lie, and what they cost."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.ir import (
    Choices,
    Cluster,
    Cuts,
    Partition,
    Placement,
    Plan,
    Prediction,
    Schedule,
    StageCosts,
    compute_stage_costs,
)
from penstock.passes import lower
from penstock.planner.measured import Measured
from penstock.planner.recompute import Flags
from penstock.planner.synthesis import Problem, lower_bound
from penstock.simulate import simulate

GIVEN = "given"
"""in place of a name, for what the user gave"""


@dataclass(frozen=True)
class Draft:
    """Everything of a plan but who does what when."""

    measured: Measured
    partition: Partition
    placement: Placement
    num_microbatches: int
    cluster: Cluster
    choices: Choices

    @cached_property
    def plain_costs(self) -> StageCosts:
        """What the stages cost if none recomputes."""
        return self._costs(())

    @cached_property
    def costs(self) -> StageCosts:
        """What the stages cost."""
        stages = [stage for stage, again in enumerate(self.choices.recompute) if again]
        return self._costs(stages) if stages else self.plain_costs

    @cached_property
    def thrifty_costs(self) -> StageCosts:
        """What the stages cost if all recompute."""
        return self._costs(range(self.partition.num_stages))

    @cached_property
    def cuts(self) -> Cuts:
        """The edges between stages."""
        return self.partition.cuts(self.measured.graph)

    @cached_property
    def problem(self) -> Problem:
        """What an order is wanted for."""
        return Problem(self.costs, self.placement, self.num_microbatches, self.cluster, self.cuts)

    @cached_property
    def bound(self) -> float:
        """Seconds that no order can undercut."""
        return lower_bound(self.problem).seconds

    def recomputing(self, flags: Flags) -> "Draft":
        """The same with other stages recomputed."""
        return replace(self, choices=replace(self.choices, recompute=flags))

    def recomputing_all(self) -> "Draft":
        """The same with all stages recomputed."""
        return self.recomputing((True,) * self.partition.num_stages)

    def cut_as(self, partition: Partition) -> "Draft":
        """The same with other cuts."""
        return replace(self, partition=partition)

    def _costs(self, recomputed: Collection[int]) -> StageCosts:
        graph, profile = self.measured
        costs = compute_stage_costs(graph, profile, self.partition, placement=self.placement, recomputed=recomputed)
        return costs.times(self.cluster.slowness_of(self.placement)) if self.cluster.slowness else costs

    def plan(self, schedule: Schedule, name: str, bound: float = 0.0) -> Plan:
        """The plan with this order, predicted; `bound` is one that was found in other ways."""
        trace = simulate(lower(schedule, cuts=self.cuts), self.costs, self.cluster)
        # The bound holds for every order, so that only rounding can put it above one.
        predicted = Prediction.of(trace, min(max(self.bound, bound), trace.makespan))
        choices = replace(self.choices, schedule=name)
        return Plan(self.measured.graph, self.partition, schedule, choices, self.costs, self.cluster, predicted)


def placement_name(placement: Placement) -> str:
    """How the stages lie on the ranks, in a word."""
    ranks = placement.num_ranks
    if placement.num_stages % ranks == 0 and placement == Placement.loop(ranks, placement.num_stages // ranks):
        return "loop"
    return "vee" if placement.num_stages == 2 * ranks and placement == Placement.vee(ranks) else "mixed"
