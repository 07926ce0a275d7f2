"""Pace: how fast the ranks of a cluster compute, beside and against each other."""

from abc import ABC
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import CostError
from penstock.ir.figures import as_int, is_finite
from penstock.ir.placement import Placement


@dataclass(frozen=True, kw_only=True)
class Pace(ABC):  # noqa: B024  # a part of Cluster, never made by itself
    """The part of a Cluster that says what a pass takes on its ranks.

    `overlap` is the share of the shorter half that an overlapped pair of passes hides: 0 runs them one after the other,
    1 hides it all. `cores` is how many of the ranks can compute at the same time, where they are processes of one
    machine; None: all of them. `slowness` is how many times longer each rank takes than a profile says; None: no rank
    does. The costs of a plan are those on its ranks, slowness included.
    """

    overlap: float = 0.0
    cores: int | None = None
    slowness: tuple[float, ...] | None = None

    def _check_pace(self, ranks: int) -> None:
        if not is_finite(self.overlap) or not 0.0 <= self.overlap <= 1.0:
            raise CostError("overlap is a share between 0 and 1", overlap=repr(self.overlap))
        if self.cores is not None and ((cores := as_int(self.cores)) is None or cores < 1):
            raise CostError("cores is a whole number above 0, or None", cores=repr(self.cores))
        if self.slowness is not None:
            object.__setattr__(self, "slowness", _factors(self.slowness, ranks))

    def slowness_of(self, placement: Placement) -> tuple[float, ...]:
        """How many times longer the passes of every stage take on the rank that holds it."""
        slowness = self.slowness or (1.0,) * placement.num_ranks
        if len(slowness) != placement.num_ranks:
            raise CostError(
                "the cluster has another number of ranks", cluster=len(slowness), placement=placement.num_ranks
            )
        return tuple(slowness[rank] for rank in placement.ranks)


def _factors(slowness: object, ranks: int) -> tuple[float, ...]:
    hint = f"slowness=({', '.join(['1'] * (min(ranks, 4) - 1))}{', ' * (ranks > 1)}1.8), 1 for a rank like any other"
    if not isinstance(slowness, Iterable) or isinstance(slowness, str | bytes):
        raise CostError("slowness needs one figure per rank", slowness=repr(slowness), ranks=ranks, hint=hint)
    factors = tuple(slowness)
    if len(factors) != ranks:
        raise CostError("slowness needs one figure per rank", figures=len(factors), ranks=ranks, hint=hint)
    if not all(is_finite(factor) and factor > 0 for factor in factors):
        raise CostError("slowness must be finite and above 0", slowness=factors, hint=hint)
    return tuple(map(float, factors))
