"""Links: what carries messages between two ranks, and gradients between the replicas of a pipeline."""

from dataclasses import dataclass

from penstock.errors import CostError
from penstock.ir.figures import as_int, is_finite

MAX_RANKS = 65536


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: seconds until the first byte arrives, bytes per second after that."""

    source: int
    target: int
    latency: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        if as_int(self.source) is None or as_int(self.target) is None:
            raise CostError("a link leads from rank to rank", source=repr(self.source), target=repr(self.target))
        check_link(self.latency, self.bandwidth)


@dataclass(frozen=True)
class Replicas:
    """Copies of the whole pipeline that average their gradients once per step, and the links between them."""

    count: int = 1
    latency: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        count = as_int(self.count)
        if count is None or not 1 <= count <= MAX_RANKS:
            raise CostError("replicas must be a whole number, 1 or more", replicas=repr(self.count), limit=MAX_RANKS)
        object.__setattr__(self, "count", count)
        check_link(self.latency, self.bandwidth)

    def reduction_seconds(self, num_bytes: float) -> float:
        """How long it takes to average so many bytes around a ring: every link carries almost twice all of them."""
        rounds = 2 * (self.count - 1)
        carried = 0.0 if self.bandwidth is None else num_bytes / self.count / self.bandwidth
        return rounds * (self.latency + carried)


def check_link(latency: float, bandwidth: float | None) -> None:
    """Refuse seconds and bytes per second that no link has."""
    if not is_finite(latency) or latency < 0:
        raise CostError("latency must be finite seconds, 0 or more", latency=repr(latency))
    if bandwidth is not None and (not is_finite(bandwidth) or bandwidth <= 0):
        hint = "a number of bytes per second such as 10e9, or None for infinite"
        raise CostError("bandwidth must be finite bytes per second, above 0", bandwidth=repr(bandwidth), hint=hint)


ALONE = Replicas()
"""a pipeline without copies"""
