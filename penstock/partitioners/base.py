"""The contract of a partitioner: it takes a Problem and returns a Division."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Cluster, Floats, Graph, Partition, Placement, Profile, TrainingState, counted, is_count, listed
from penstock.partitioners.atoms import Atoms, build_atoms, inseparable_nodes, named_groups

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Problem:
    """A measured graph, the ranks to divide it among, and constraints."""

    graph: Graph
    profile: Profile
    cluster: Cluster
    """the ranks, their memory and slowness, and the links between them"""
    placement: Placement | None = None
    """the rank of each stage; None: one stage per rank, unless the partitioner chooses placements (mpipe, auto)"""
    in_flight: int | tuple[int, ...] = 1
    """microbatches whose activations a stage holds at once, for limits of memory: one number, or one per stage"""
    training: TrainingState = TrainingState()
    """the bytes of gradients and optimizer state per parameter, for limits of memory"""
    together: tuple[tuple[str, ...], ...] = ()
    """groups of names of nodes or modules that must not be separated"""
    overlaps: bool = True
    """True: messages travel while ranks compute, so that the load of a rank is the longer of both; False: their sum"""

    def __post_init__(self) -> None:
        self.profile.check(self.graph)
        if self.placement is not None and self.placement.num_ranks != self.cluster.ranks:
            raise PartitionError(
                "placement and cluster must have the same number of ranks",
                placement=self.placement.num_ranks,
                cluster=self.cluster.ranks,
            )
        if any(isinstance(group, str) for group in self.together):
            raise PartitionError("nodes to keep together must be groups of names", together=self.together)
        if not isinstance(self.training, TrainingState):
            raise PartitionError("training must be a TrainingState", got=repr(self.training))
        counts = self.in_flight if isinstance(self.in_flight, tuple) else (self.in_flight,)
        if not counts or not all(map(is_count, counts)):
            raise PartitionError("microbatches in flight must be whole numbers, 1 or more", in_flight=self.in_flight)
        if isinstance(self.in_flight, tuple) and len(counts) != self.num_stages:
            raise PartitionError(
                "microbatches in flight must be given once per stage", got=len(counts), stages=self.num_stages
            )

    def on(self, placement: Placement) -> "Problem":
        """Returns the problem for another placement; microbatches in flight given per stage become their maximum."""
        flight = self.in_flight
        most = max(flight) if isinstance(flight, tuple) and len(flight) != placement.num_stages else flight
        other = replace(self, placement=placement, in_flight=most)
        # Atoms do not depend on the placement, and take long to build for large graphs.
        other.__dict__["atoms"] = self.atoms
        return other

    @cached_property
    def placed(self) -> Placement:
        """The placement, by default one stage per rank."""
        return self.placement or Placement.loop(self.cluster.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages to make."""
        return self.placed.num_stages

    @property
    def is_single(self) -> bool:
        """Whether every rank holds one stage."""
        return self.num_stages == self.placed.num_ranks

    @cached_property
    def atoms(self) -> Atoms:
        """The graph as arrays, with nodes that must stay together in one atom."""
        groups = inseparable_nodes(self.graph) + named_groups(self.graph, self.together)
        return build_atoms(self.graph, self.profile, groups, self.training)

    @cached_property
    def slowness_of(self) -> Floats:
        """Slowness of every rank."""
        return np.array(self.cluster.slowness or (1.0,) * self.cluster.ranks)

    @cached_property
    def limit_of(self) -> Floats:
        """Bytes of memory of every rank; inf without a limit."""
        return np.array(self.cluster.limits or (np.inf,) * self.cluster.ranks, dtype=np.float64)

    @cached_property
    def in_flight_of(self) -> Floats:
        """Microbatches in flight of every stage."""
        flight = self.in_flight
        return np.array(flight if isinstance(flight, tuple) else (flight,) * self.num_stages, dtype=np.float64)


@dataclass(frozen=True)
class Division:
    """A partition with its loads and with proven bounds.

    Seconds are those of one microbatch, forward and backward. The load of a rank is the sum over its stages, messages
    included as Problem.overlaps states.
    """

    partition: Partition
    placement: Placement
    load_seconds: tuple[float, ...]
    """per rank"""
    lower_bound_seconds: float
    """no partition into stages has a smaller bottleneck"""
    contiguous_bound_seconds: float
    """no partition into runs of the graph's order has a smaller one; inf: none fits in memory"""
    cut_bytes: int
    """bytes between ranks for one microbatch, both ways, and of parameters for every rank but one that holds them"""
    why: str
    """how it was found, in words"""

    @property
    def bottleneck_seconds(self) -> float:
        """The load of the busiest rank."""
        return max(self.load_seconds)

    @property
    def ratio(self) -> float:
        """The bottleneck over the lower bound: 1 is proven to be optimal."""
        return self.bottleneck_seconds / self.lower_bound_seconds if self.lower_bound_seconds > 0 else 1.0

    @property
    def proof(self) -> str:
        """The proven bound, in words."""
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
    """A way to cut; its fields are its options.

    `auto` and the planner read the table PARTITIONERS and the class attributes below, so that a new member takes part
    in every search without being named there.
    """

    name: ClassVar[str]
    is_tried: ClassVar[bool] = True
    """whether `auto` and the planner try it; False for members that ignore measured seconds"""
    is_fast: ClassVar[bool] = False
    """fast enough for every placement that the planner considers; the others only cut for the best placement"""
    is_for_slow_links: ClassVar[bool] = False
    """trades compute for fewer bytes: only of use if messages take time"""
    chooses_placement: ClassVar[bool] = False
    """picks the placement where the problem has none"""
    supports_mixed: ClassVar[bool] = True
    """may be given several stages per rank by `divide(..., is_mixed=True)`"""
    is_optional: ClassVar[bool] = False
    """needs an extra: `auto` tries it if `is_available`, the planner never, so that plans do not depend on extras"""

    @classmethod
    def is_available(cls) -> bool:
        """Returns whether the libraries that it needs are installed."""
        return True

    def __call__(self, problem: Problem) -> Division:
        """Returns the division; raises PartitionError if there are too few atoms or a rank would lack memory."""
        places = len(problem.atoms) - 1
        if places < problem.num_stages - 1:
            raise too_few_places(places, problem.num_stages, problem.graph)
        division = self.divide(problem)
        if problem.graph.storage or problem.graph.updates:
            division.partition.check(problem.graph)
        return division

    @abstractmethod
    def divide(self, problem: Problem) -> Division:
        """Returns the division of a problem with at least as many atoms as stages."""


def too_few_places(places: int, num_stages: int, graph: Graph) -> PartitionError:
    """Returns the error for a graph that cannot be cut into that many stages."""
    is_closed, most = places < len(graph.nodes) - 1, places + 1
    modules = list(dict.fromkeys(node.module or node.name for node in graph.nodes if not node.from_inputs))
    reason = "; memory or a buffer that is written keeps nodes together" if is_closed else ""
    return PartitionError(
        f"the model has fewer places to cut than asked for, at most {counted(most, 'stage')} in all",
        places=places,
        stages=num_stages,
        modules=listed(modules, 6),
        hint=f"at most {counted(most, 'rank')} with one stage each, or a larger depth, which opens modules{reason}",
    )
