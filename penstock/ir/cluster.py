"""Cluster: the ranks, their memory, and the links between them."""

import math
import re
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import CostError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
MAX_RANKS = 65536


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: seconds until the first byte arrives, bytes per second after that."""

    source: int
    target: int
    latency: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        _check_link(self.latency, self.bandwidth)


@dataclass(frozen=True)
class Cluster:
    """Where a pipeline runs.

    `memory` is bytes per rank: one figure (`"24GiB"` also) or one per rank; None is no limit. `latency` in seconds and
    `bandwidth` in bytes per second (None: infinite) hold for every link that is not named in `links`. `overlap` is the
    share of the shorter half that an overlapped pair of passes hides: 0 runs them one after the other, 1 hides it all.
    """

    ranks: int
    memory: "int | str | tuple[int, ...] | None" = None
    latency: float = 0.0
    bandwidth: float | None = None
    links: tuple[Link, ...] = ()
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise CostError("ranks out of range", ranks=self.ranks, limit=MAX_RANKS)
        _check_link(self.latency, self.bandwidth)
        if not 0.0 <= self.overlap <= 1.0:
            raise CostError("overlap is a share between 0 and 1", overlap=self.overlap)
        if self.memory is not None:
            figures = (self.memory,) * self.ranks if isinstance(self.memory, str | int) else self.memory
            if len(figures) != self.ranks:
                raise CostError("memory needs one figure, or one per rank", figures=len(figures), ranks=self.ranks)
            object.__setattr__(self, "memory", tuple(map(parse_bytes, figures)))
        for link in self.links:
            if not (0 <= link.source < self.ranks and 0 <= link.target < self.ranks):
                raise CostError("a link between ranks that do not exist", link=link, ranks=self.ranks)

    @cached_property
    def _named(self) -> dict[tuple[int, int], Link]:
        return {(link.source, link.target): link for link in self.links}

    def link(self, source: int, target: int) -> Link:
        """The link that carries messages from one rank to another."""
        return self._named.get((source, target)) or Link(source, target, self.latency, self.bandwidth)


def parse_bytes(size: int | str) -> int:
    """Bytes of a figure such as 1024, `"24GiB"` or `"1.5 MB"`."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]{0,3})\s*", size) if isinstance(size, str) else None
    if not match or match[2].upper() not in _UNITS or float(match[1]) == 0:
        raise CostError("not a size in bytes", size=repr(size), hint='a number such as 1073741824, or "24GiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _check_link(latency: float, bandwidth: float | None) -> None:
    if not (math.isfinite(latency) and latency >= 0):
        raise CostError("latency must be finite seconds, 0 or more", latency=latency)
    if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth > 0):
        hint = "None for infinite"
        raise CostError("bandwidth must be finite bytes per second, above 0", bandwidth=bandwidth, hint=hint)
