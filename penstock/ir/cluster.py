"""Cluster: the ranks, their memory, and the links between them."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

from penstock.errors import CostError
from penstock.ir.figures import as_int
from penstock.ir.links import ALONE, MAX_RANKS, Link, Replicas, check_link
from penstock.ir.pace import Pace

_DECIMAL_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL_UNITS, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
MAX_MEMORY = 2**63 - 1


@dataclass(frozen=True)
class Cluster(Pace):
    """Where a pipeline runs.

    `memory` is bytes per rank: one figure (`"24GiB"` also) or one per rank; None is no limit. `latency` in seconds and
    `bandwidth` in bytes per second (None: infinite) hold for every link that is not named in `links`. With `replicas`,
    a step ends when the gradients of all copies of the pipeline are averaged. `overlap`, `cores` and `slowness` are
    those of a Pace.
    """

    ranks: int
    memory: "int | str | tuple[int, ...] | None" = None
    latency: float = 0.0
    bandwidth: float | None = None
    links: tuple[Link, ...] = ()
    replicas: Replicas = ALONE

    def __post_init__(self) -> None:
        _check_replicas(self.replicas)
        if (ranks := as_int(self.ranks)) is None:
            raise CostError("ranks must be a whole number", ranks=repr(self.ranks))
        if not 1 <= ranks <= MAX_RANKS:
            raise CostError("ranks out of range", ranks=ranks, limit=MAX_RANKS)
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "links", _links(self.links, ranks))
        check_link(self.latency, self.bandwidth)
        self._check_pace(ranks)
        if self.memory is not None:
            object.__setattr__(self, "memory", _figures(self.memory, ranks))

    @property
    def limits(self) -> tuple[int, ...]:
        """Bytes per rank; empty: no limit."""
        return self.memory if isinstance(self.memory, tuple) else ()

    @cached_property
    def _named(self) -> dict[tuple[int, int], Link]:
        return {(link.source, link.target): link for link in self.links}

    def link(self, source: int, target: int) -> Link:
        """The link that carries messages from one rank to another."""
        return self._named.get((source, target)) or Link(source, target, self.latency, self.bandwidth)


def parse_bytes(size: int | str) -> int:
    """Bytes of a figure such as 1024, `"24GiB"` or `"1.5 MB"`."""
    amount, unit = _amount(size)
    # Compared first: no text is so long that it overflows here.
    if amount > MAX_MEMORY or amount * unit > MAX_MEMORY:
        raise CostError("a size out of range", size=_short(size), limit=MAX_MEMORY)
    if amount * unit < 1:
        raise _no_size(size)
    return int(amount * unit)


def _amount(size: object) -> tuple[Decimal | int, int]:
    if (number := as_int(size)) is not None:
        return number, 1
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]{0,3})\s*", size) if isinstance(size, str) else None
    if not match or match[2].upper() not in _UNITS:
        raise _no_size(size)
    return Decimal(match[1]), _UNITS[match[2].upper()]


def _no_size(size: object) -> CostError:
    return CostError("not a size in bytes", size=_short(size), hint='a whole number such as 1073741824, or "24GiB"')


def _short(size: object) -> str:
    return f"{size!r:.40}" if isinstance(size, str) else repr(size)


def _figures(memory: object, ranks: int) -> tuple[int, ...]:
    if not isinstance(memory, Iterable) or isinstance(memory, str | bytes):
        return (parse_bytes(memory),) * ranks  # type: ignore[arg-type]  # what is no size is refused there
    figures = tuple(map(parse_bytes, memory))
    if len(figures) != ranks:
        raise CostError("memory needs one figure, or one per rank", figures=len(figures), ranks=ranks)
    return figures


def _links(links: object, ranks: int) -> tuple[Link, ...]:
    named = tuple(links) if isinstance(links, Iterable) else (links,)
    for link in named:
        if not isinstance(link, Link):
            raise CostError("links are Link records", given=repr(link), hint="links=[Link(0, 1, latency, bandwidth)]")
        if not (0 <= link.source < ranks and 0 <= link.target < ranks):
            raise CostError("a link between ranks that do not exist", link=link, ranks=ranks)
    for (source, target), times in Counter((link.source, link.target) for link in named).items():
        if times > 1:
            raise CostError("a link is named more than once", source=source, target=target, times=times)
    return named


def _check_replicas(replicas: object) -> None:
    if not isinstance(replicas, Replicas):
        hint = "replicas=Replicas(4, latency, bandwidth)"
        raise CostError("replicas are a Replicas record", given=repr(replicas), hint=hint)
