"""The rank of every stage (Placement), and the edges between stages (Cuts)."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import PartitionError, ScheduleError
from penstock.ir.arguments import is_count

StageEdge = tuple[int, int]
MAX_STAGES = 8192


@dataclass(frozen=True)
class Placement:
    """The rank of every stage; `placement[stage]` is a rank, every rank holds at least one stage."""

    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0:
            raise ScheduleError("a placement must name a rank, 0 or more, for every stage", placement=self.ranks)
        # A rank above the number of stages implies an empty rank below that number, so looking that far is enough.
        if missing := sorted(set(range(min(max(self.ranks), len(self.ranks)) + 1)) - set(self.ranks)):
            raise ScheduleError("every rank must hold a stage", ranks=missing, placement=self.ranks)

    @classmethod
    def loop(cls, num_ranks: int, stages_per_rank: int = 1) -> "Placement":
        """Round robin: rank r holds r, r + ranks, r + 2 ranks ..."""
        return cls(tuple(range(num_ranks)) * stages_per_rank)

    @classmethod
    def vee(cls, num_ranks: int) -> "Placement":
        """Down the ranks and back up: rank r holds r and 2 ranks - 1 - r."""
        return cls((*range(num_ranks), *reversed(range(num_ranks))))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ranks)

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return max(self.ranks) + 1

    @property
    def kind(self) -> str:
        """How stages are placed on ranks: "loop", "vee", or "mixed" for any other placement."""
        if self == Placement.loop(self.num_ranks, self.num_stages // self.num_ranks):
            return "loop"
        return "vee" if self == Placement.vee(self.num_ranks) else "mixed"

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank, ascending."""
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.ranks):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def __getitem__(self, stage: int) -> int:
        return self.ranks[stage]

    def __len__(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Cuts:
    """The edges (producer stage, consumer stage) of a model cut into stages.

    Values go forward only, from a lower stage to a higher one. An edge in `without_gradient` carries values that need
    no gradient back, such as masks.
    """

    num_stages: int
    """number of stages"""
    edges: tuple[StageEdge, ...]
    """pairs (producer stage, consumer stage), sorted"""
    without_gradient: tuple[StageEdge, ...] = ()
    """those of them over which no gradient returns"""

    def __post_init__(self) -> None:
        if not is_count(self.num_stages, MAX_STAGES):
            raise PartitionError("cuts must have at least one stage", stages=repr(self.num_stages), limit=MAX_STAGES)
        for edges in (self.edges, self.without_gradient):
            if list(edges) != sorted(set(edges)):
                raise PartitionError("cut edges must be sorted and distinct", edges=edges[:8], hint="Cuts.of(...)")
        for producer, consumer in self.edges:
            if not 0 <= producer < consumer < self.num_stages:
                edge = (producer, consumer)
                raise PartitionError("a cut edge must lead to a later stage", edge=edge, stages=self.num_stages)
        if unknown := set(self.without_gradient) - set(self.edges):
            raise PartitionError("edges without gradient must be edges of the cuts", edges=sorted(unknown))

    @classmethod
    def chain(cls, num_stages: int) -> "Cuts":
        """Every stage reads the stage before it and nothing else.

        Args:
            num_stages: number of stages
        """
        return cls(num_stages, tuple((stage, stage + 1) for stage in range(num_stages - 1)))

    @classmethod
    def of(cls, num_stages: int, edges: Iterable[StageEdge], without_gradient: Iterable[StageEdge] = ()) -> "Cuts":
        """Cuts from edges in any order.

        Args:
            num_stages: number of stages
            edges: pairs (producer stage, consumer stage)
            without_gradient: those of them over which no gradient returns
        """
        return cls(num_stages, tuple(sorted(set(edges))), tuple(sorted(set(without_gradient))))

    @cached_property
    def gradient_edges(self) -> tuple[StageEdge, ...]:
        """The edges over which gradients return."""
        skipped = set(self.without_gradient)
        return tuple(edge for edge in self.edges if edge not in skipped)

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """By stage, the stages whose values it reads."""
        return self._by_stage((consumer, producer) for producer, consumer in self.edges)

    @cached_property
    def gradient_consumers(self) -> tuple[tuple[int, ...], ...]:
        """By stage, the stages that return gradients to it."""
        return self._by_stage(self.gradient_edges)

    def _by_stage(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        """By the first stage of each pair, the second ones."""
        found: list[list[int]] = [[] for _ in range(self.num_stages)]
        for stage, other in pairs:
            found[stage].append(other)
        return tuple(map(tuple, found))
