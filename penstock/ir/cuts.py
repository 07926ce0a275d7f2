"""Cuts: which stages read values of which other stages."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import PartitionError
from penstock.ir.figures import as_int

Edge = tuple[int, int]
MAX_STAGES = 8192


@dataclass(frozen=True)
class Cuts:
    """The edges (producer stage, consumer stage) of a model cut into stages.

    Values go forward only, from a lower stage to a higher one. An edge in `without_gradient` carries values that need
    no gradient back, such as masks.
    """

    num_stages: int
    edges: tuple[Edge, ...]
    without_gradient: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= (as_int(self.num_stages) or 0) <= MAX_STAGES:
            raise PartitionError("cuts need at least one stage", stages=repr(self.num_stages), limit=MAX_STAGES)
        for edges in (self.edges, self.without_gradient):
            if list(edges) != sorted(set(edges)):
                raise PartitionError("cut edges must be sorted and distinct", edges=edges[:8], hint="Cuts.of(...)")
        for producer, consumer in self.edges:
            if not 0 <= producer < consumer < self.num_stages:
                edge = (producer, consumer)
                raise PartitionError("a cut edge must lead to a later stage", edge=edge, stages=self.num_stages)
        if unknown := set(self.without_gradient) - set(self.edges):
            raise PartitionError("an edge without gradient is no edge of the cuts", edges=sorted(unknown))

    @classmethod
    def chain(cls, num_stages: int) -> "Cuts":
        """Every stage reads the stage before it and nothing else."""
        return cls(num_stages, tuple((stage, stage + 1) for stage in range(num_stages - 1)))

    @classmethod
    def of(cls, num_stages: int, edges: Iterable[Edge], without_gradient: Iterable[Edge] = ()) -> "Cuts":
        """The same from edges in any order."""
        return cls(num_stages, tuple(sorted(set(edges))), tuple(sorted(set(without_gradient))))

    @cached_property
    def gradient_edges(self) -> tuple[Edge, ...]:
        """The edges over which gradients return."""
        silent = set(self.without_gradient)
        return tuple(edge for edge in self.edges if edge not in silent)

    def producers(self, stage: int) -> tuple[int, ...]:
        """The stages whose values the stage reads."""
        return self._producers.get(stage, ())

    def gradient_consumers(self, stage: int) -> tuple[int, ...]:
        """The stages that return gradients to the stage."""
        return self._gradient_consumers.get(stage, ())

    @cached_property
    def _producers(self) -> dict[int, tuple[int, ...]]:
        return _grouped((consumer, producer) for producer, consumer in self.edges)

    @cached_property
    def _gradient_consumers(self) -> dict[int, tuple[int, ...]]:
        return _grouped(self.gradient_edges)


def _grouped(pairs: Iterable[Edge]) -> dict[int, tuple[int, ...]]:
    groups: dict[int, list[int]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in groups.items()}
