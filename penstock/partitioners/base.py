"""The contract of a partitioner: a Problem goes in, a Division comes out."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Cluster, Graph, Partition, Placement, Profile, as_int
from penstock.partitioners.atoms.atomise import atomise
from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Floats
from penstock.partitioners.together import named, together

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Holding:
    """What a rank holds beside the parameters of its stages, where memory is limited."""

    in_flight: int | tuple[int, ...] = 1
    """microbatches whose activations a stage holds at once: one figure, or one per stage"""
    optimizer_copies: int = 0
    """figures that the optimizer holds for each trained one: 0 for plain SGD, 2 for Adam"""

    def __post_init__(self) -> None:
        figures = self.in_flight if isinstance(self.in_flight, tuple) else (self.in_flight,)
        if not figures or any((as_int(figure) or 0) < 1 for figure in figures):
            raise PartitionError("microbatches in flight must be whole numbers, 1 or more", in_flight=self.in_flight)
        if as_int(self.optimizer_copies) is None or self.optimizer_copies < 0:
            raise PartitionError("copies of the optimizer must be 0 or more", optimizer_copies=self.optimizer_copies)


@dataclass(frozen=True)
class Problem:
    """What is to be cut, and for whom."""

    graph: Graph
    profile: Profile
    cluster: Cluster
    """the ranks, their memory and slowness, the links between them"""
    placement: Placement | None = None
    """which rank holds each stage; None: one stage per rank, unless the partitioner chooses placements (mpipe, auto)"""
    holding: Holding = Holding()
    together: tuple[tuple[str, ...], ...] = ()
    """names of nodes or modules that must not be separated, group by group"""
    overlaps: bool = True
    """messages travel while ranks compute, so that a rank is as busy as the longer of both; False: it waits for them"""

    def __post_init__(self) -> None:
        self.profile.check(self.graph)
        if self.placement is not None and self.placement.num_ranks != self.cluster.ranks:
            raise PartitionError(
                "the placement is for other ranks", placement=self.placement.num_ranks, cluster=self.cluster.ranks
            )
        if any(isinstance(group, str) for group in self.together):
            raise PartitionError("nodes to keep together are given as groups of names", together=self.together)
        flight = self.holding.in_flight
        if isinstance(flight, tuple) and len(flight) != self.num_stages:
            raise PartitionError(
                "microbatches in flight need one figure per stage", figures=len(flight), stages=self.num_stages
            )

    @classmethod
    def stages(cls, graph: Graph, profile: Profile, num_stages: int) -> "Problem":
        """As many ranks as stages, all alike, without limits."""
        count = as_int(num_stages)
        if count is None or count < 1:
            raise PartitionError("the number of stages must be a whole number, 1 or more", stages=repr(num_stages))
        return cls(graph, profile, Cluster(count))

    def on(self, placement: Placement) -> "Problem":
        """The same for another placement; where microbatches in flight were given per stage, the most are taken."""
        flight = self.holding.in_flight
        most = max(flight) if isinstance(flight, tuple) and len(flight) != placement.num_stages else flight
        other = replace(self, placement=placement, holding=replace(self.holding, in_flight=most))
        # What was worked out of the graph does not depend on the placement.
        other.__dict__["atoms"] = self.atoms
        return other

    @cached_property
    def placed(self) -> Placement:
        """The placement, by default one stage per rank."""
        return self.placement or Placement.loop(self.cluster.ranks)

    @property
    def num_stages(self) -> int:
        """How many stages there are to be."""
        return self.placed.num_stages

    @property
    def is_single(self) -> bool:
        """Whether every rank holds one stage."""
        return self.num_stages == self.placed.num_ranks

    @cached_property
    def atoms(self) -> Atoms:
        """The graph in figures, with everything that must stay together in one atom."""
        groups = together(self.graph) + named(self.graph, self.together)
        return atomise(self.graph, self.profile, groups, self.holding.optimizer_copies)

    @cached_property
    def slowness_of(self) -> Floats:
        """Per rank."""
        return np.array(self.cluster.slowness or (1.0,) * self.cluster.ranks)

    @cached_property
    def limit_of(self) -> Floats:
        """Bytes of memory per rank; infinite where there is no limit."""
        return np.array(self.cluster.limits or (np.inf,) * self.cluster.ranks, dtype=np.float64)

    @cached_property
    def in_flight(self) -> Floats:
        """Microbatches in flight per stage."""
        flight = self.holding.in_flight
        return np.array(flight if isinstance(flight, tuple) else (flight,) * self.num_stages, dtype=np.float64)


@dataclass(frozen=True)
class Division:
    """A partition, how well it does, and how well any could do.

    Seconds are those of one microbatch, forward and backward. The load of a rank is the sum over its stages, messages
    included as the Problem says.
    """

    partition: Partition
    placement: Placement
    load_seconds: tuple[float, ...]
    """per rank"""
    lower_bound_seconds: float
    """no partition into stages has a bottleneck below this"""
    contiguous_bound_seconds: float
    """no partition into runs of the graph's order has one below this; infinite: none fits in memory"""
    cut_bytes: int
    """bytes between ranks for one microbatch, both ways, and of parameters for every rank but one that holds them"""
    why: str
    """in words, how it was found"""

    @property
    def bottleneck_seconds(self) -> float:
        """The load of the busiest rank."""
        return max(self.load_seconds)

    @property
    def ratio(self) -> float:
        """The bottleneck over the lower bound: 1 is proven to be the best."""
        return self.bottleneck_seconds / self.lower_bound_seconds if self.lower_bound_seconds > 0 else 1.0

    @property
    def proof(self) -> str:
        """In words, what is proven."""
        if self.ratio <= 1 + _ROUNDING:
            return "no partition is better"
        gap = f"no partition is better by more than {1 - 1 / self.ratio:.1%}"
        is_best_of_runs = math.isclose(self.bottleneck_seconds, self.contiguous_bound_seconds, rel_tol=_ROUNDING)
        return f"no cut into runs is better; {gap}" if is_best_of_runs else gap

    def __str__(self) -> str:
        share = f"{self.bottleneck_seconds:.6g} s on the busiest of {self.placement.num_ranks} ranks"
        return f"{share}, at least {self.lower_bound_seconds:.6g} s needed: {self.why}; {self.proof}"


@dataclass(frozen=True)
class Partitioner(ABC):
    """A way to cut; its fields are its options."""

    name: ClassVar[str]

    def __call__(self, problem: Problem) -> Division:
        """The division; refused if there are fewer atoms than stages, or no memory for what is found."""
        places = len(problem.atoms) - 1
        if places < problem.num_stages - 1:
            closed = len(problem.graph.nodes) - 1 - places
            raise PartitionError(
                "the graph has fewer places to cut than asked for",
                places=places,
                stages=problem.num_stages,
                hint="memory or a buffer that is written keeps nodes together: fewer stages"
                if closed
                else "fewer stages",
            )
        division = self.divide(problem)
        if problem.graph.storage or problem.graph.updates:
            division.partition.check(problem.graph)
        return division

    @abstractmethod
    def divide(self, problem: Problem) -> Division:
        """The division of a graph that has at least as many atoms as there are stages."""
