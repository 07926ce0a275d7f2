"""The hardware: ranks, their memory and speed, and the links between them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from penstock.errors import CostError
from penstock.ir.arguments import as_int, is_count, is_finite, parse_bytes
from penstock.ir.costs import LARGEST, StageCosts
from penstock.ir.orders import Floats, Ints
from penstock.ir.overhead import Overhead
from penstock.ir.placement import Cuts, Placement

MAX_RANKS = 65536


@dataclass(frozen=True)
class LinkSpeed:
    """Achieved bandwidth and latency of one direction between two devices."""

    bandwidth: float | None
    """bytes per second; None: infinite"""
    latency: float
    """seconds"""

    @classmethod
    def slowest(cls, links: "Sequence[Link]") -> "LinkSpeed":
        """The least bandwidth and the largest latency of some links."""
        bandwidths = [link.bandwidth for link in links if link.bandwidth is not None]
        return cls(min(bandwidths, default=None), max(link.latency for link in links))

    def ring_seconds(self, members: int, num_bytes: float) -> float:
        """Seconds of a ring all-reduce: every link carries almost twice the bytes, in 2 (members - 1) rounds."""
        carried = 0.0 if self.bandwidth is None else num_bytes / members / self.bandwidth
        return 2 * (members - 1) * (self.latency + carried)


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: seconds until the first byte arrives, bytes per second after that."""

    source: int
    """the sending rank"""
    target: int
    """the receiving rank"""
    latency: float = 0.0
    """seconds until the first byte arrives"""
    bandwidth: float | None = None
    """bytes per second; None: infinite"""

    def __post_init__(self) -> None:
        if as_int(self.source) is None or as_int(self.target) is None:
            raise CostError("source and target must be ranks", source=repr(self.source), target=repr(self.target))
        _check_link(self.latency, self.bandwidth)


@dataclass(frozen=True, eq=False)
class LinkRates:
    """Converts the bytes of messages to seconds; an entry per link, in arrays of one shape.

    Simulation, partitioners and synthesis all take the time of a message from here, so a new cost of messages is a
    field of Link and of Cluster, computed here. Collectives take theirs from `LinkSpeed.ring_seconds`. Within one rank
    nothing is sent: callers ignore these entries.
    """

    seconds_per_byte: Floats
    latency: Floats
    """seconds from the end of sending to the arrival; the link is free meanwhile"""

    def __getitem__(self, index: Any) -> "LinkRates":
        """The rates of some links, selected as numpy does."""
        return LinkRates(self.seconds_per_byte[index], self.latency[index])

    def times(self, factor: Any) -> "LinkRates":
        """The rates of links on which messages take `factor` times as long; an array has a factor per link."""
        return LinkRates(self.seconds_per_byte * factor, self.latency * factor)

    def occupied(self, num_bytes: Floats) -> Floats:
        """Seconds for which messages of these sizes occupy their links."""
        return num_bytes * self.seconds_per_byte

    def total(self, num_bytes: Floats) -> Floats:
        """Seconds from sending to arrival over free links; 0 for messages without bytes."""
        return self.occupied(num_bytes) + self.latency * (num_bytes > 0)


@dataclass(frozen=True)
class Replicas:
    """Copies of the whole pipeline that average their gradients once per step, and the links between them."""

    count: int = 1
    """number of copies; 1: no replicas"""
    latency: float = 0.0
    """seconds of a message between replicas"""
    bandwidth: float | None = None
    """bytes per second between replicas; None: infinite"""
    per_node: int = field(default=1, kw_only=True)
    """replicas that share a node; they reduce within it first, so that each sends a part of the bytes to other nodes"""
    node_latency: float = field(default=0.0, kw_only=True)
    """seconds of a message between replicas of one node"""
    node_bandwidth: float | None = field(default=None, kw_only=True)
    """bytes per second between replicas of one node; None: infinite"""

    def __post_init__(self) -> None:
        for name, given in (("replicas", self.count), ("replicas per node", self.per_node)):
            if not is_count(given, MAX_RANKS):
                raise CostError(f"{name} must be a whole number, 1 or more", got=repr(given), limit=MAX_RANKS)
        object.__setattr__(self, "count", as_int(self.count))
        object.__setattr__(self, "per_node", as_int(self.per_node))
        _check_link(self.latency, self.bandwidth)
        _check_link(self.node_latency, self.node_bandwidth)

    @classmethod
    def over(
        cls, count: int, link: LinkSpeed, node_link: LinkSpeed = LinkSpeed(None, 0.0), per_node: int = 1
    ) -> "Replicas":
        """Replicas with these links between nodes and within a node."""
        return cls(
            count,
            link.latency,
            link.bandwidth,
            per_node=per_node,
            node_latency=node_link.latency,
            node_bandwidth=node_link.bandwidth,
        )

    def reduction_seconds(self, num_bytes: float) -> float:
        """Seconds of an all-reduce: in a ring on each node, then with the part of each replica in a ring over nodes."""
        here = min(self.per_node, self.count)
        nodes = -(-self.count // here)
        within = LinkSpeed(bandwidth=self.node_bandwidth, latency=self.node_latency).ring_seconds(here, num_bytes)
        return within + LinkSpeed(bandwidth=self.bandwidth, latency=self.latency).ring_seconds(nodes, num_bytes / here)


def _check_link(latency: float, bandwidth: float | None) -> None:
    if not is_finite(latency) or latency < 0:
        raise CostError("latency must be finite seconds, 0 or more", latency=repr(latency))
    if latency > LARGEST:
        raise CostError(f"latency must be at most {LARGEST:g}", latency=repr(latency))
    if bandwidth is not None and (not is_finite(bandwidth) or bandwidth <= 0):
        hint = "a number of bytes per second such as 10e9, or None for infinite"
        raise CostError("bandwidth must be finite bytes per second, above 0", bandwidth=repr(bandwidth), hint=hint)
    if bandwidth is not None and bandwidth < 1 / LARGEST:
        raise CostError(f"bandwidth must be at least {1 / LARGEST:g}", bandwidth=repr(bandwidth))


@dataclass(frozen=True)
class Cluster:
    """Where a pipeline runs.

    With `replicas`, a step ends when the gradients of all copies of the pipeline are averaged. The costs of a plan
    are those on its ranks, slowness and overhead included.
    """

    ranks: int
    """number of pipeline ranks"""
    memory: "int | str | tuple[int, ...] | None" = None
    """bytes per rank: one size (also as `"24GiB"`) or one per rank; None: no limit"""
    latency: float = 0.0
    """seconds of every link that is not in `links`"""
    bandwidth: float | None = None
    """bytes per second of every link that is not in `links`; None: infinite"""
    links: tuple[Link, ...] = ()
    """links that differ from the others"""
    replicas: Replicas = Replicas()
    """copies of the whole pipeline"""
    overlap: float = field(default=0.0, kw_only=True)
    """share of its shorter half that an overlapped pair of passes hides: 0 runs one after the other, 1 hides it all"""
    cores: int | None = field(default=None, kw_only=True)
    """how many ranks can compute at the same time, if they are processes of one machine; None: all of them"""
    slowness: tuple[float, ...] | None = field(default=None, kw_only=True)
    """how many times longer each rank takes than the profile; None: 1 for every rank"""
    overhead: Overhead = field(default=Overhead(), kw_only=True)
    """what the runtime, and ranks that share a machine, add to passes, messages and steps"""

    def __post_init__(self) -> None:
        replicas: object = self.replicas  # a caller may pass a number
        if not isinstance(replicas, Replicas):
            hint = "replicas=Replicas(4, latency, bandwidth)"
            raise CostError("replicas must be a Replicas record", got=repr(replicas), hint=hint)
        overhead: object = self.overhead
        if not isinstance(overhead, Overhead):
            hint = "overhead=Overhead(pass_seconds=1e-4)"
            raise CostError("overhead must be an Overhead record", got=repr(overhead), hint=hint)
        if (ranks := as_int(self.ranks)) is None:
            raise CostError("ranks must be a whole number", ranks=repr(self.ranks))
        if not 1 <= ranks <= MAX_RANKS:
            raise CostError("ranks must be from 1 to the limit", ranks=ranks, limit=MAX_RANKS)
        object.__setattr__(self, "ranks", ranks)
        links: object = self.links
        named = tuple(links) if isinstance(links, Iterable) else (links,)
        for link in named:
            if not isinstance(link, Link):
                hint = "links=[Link(0, 1, latency, bandwidth)]"
                raise CostError("links must be Link records", got=repr(link), hint=hint)
            if not (0 <= link.source < ranks and 0 <= link.target < ranks):
                raise CostError("a link must connect ranks of the cluster", link=link, ranks=ranks)
        for (source, target), times in Counter((link.source, link.target) for link in named).items():
            if times > 1:
                raise CostError("every link must be named once", source=source, target=target, times=times)
        object.__setattr__(self, "links", named)
        _check_link(self.latency, self.bandwidth)
        if not is_finite(self.overlap) or not 0.0 <= self.overlap <= 1.0:
            raise CostError("overlap must be a share between 0 and 1", overlap=repr(self.overlap))
        if self.cores is not None and not is_count(self.cores):
            raise CostError("cores must be a whole number above 0, or None", cores=repr(self.cores))
        if self.slowness is not None:
            object.__setattr__(self, "slowness", _check_slowness(self.slowness, ranks))
        memory: Any = self.memory
        if memory is not None:
            is_one = not isinstance(memory, Iterable) or isinstance(memory, str | bytes)
            sizes = (parse_bytes(memory),) * ranks if is_one else tuple(map(parse_bytes, memory))
            if len(sizes) != ranks:
                raise CostError("memory must be one size, or one per rank", sizes=len(sizes), ranks=ranks)
            object.__setattr__(self, "memory", sizes)

    @property
    def limits(self) -> tuple[int, ...]:
        """Bytes per rank; empty: no limit."""
        return self.memory if isinstance(self.memory, tuple) else ()

    @cached_property
    def _named_links(self) -> dict[tuple[int, int], Link]:
        return {(link.source, link.target): link for link in self.links}

    def link(self, source: int, target: int) -> Link:
        """The link that carries messages from one rank to another.

        Args:
            source: the sending rank
            target: the receiving rank
        """
        return self._named_links.get((source, target)) or Link(source, target, self.latency, self.bandwidth)

    def link_rates(self, source: Ints, target: Ints) -> LinkRates:
        """The rates of the links between pairs of ranks, given as arrays of one shape."""
        pairs, which = np.array([0]), np.zeros(source.shape, dtype=np.int64)
        if self.links:
            pairs, which = np.unique(source * self.ranks + target, return_inverse=True)
        links = [self.link(*divmod(int(pair), self.ranks)) for pair in pairs]
        return LinkRates(
            np.array([1.0 / link.bandwidth if link.bandwidth else 0.0 for link in links]),
            np.array([link.latency for link in links], dtype=np.float64),
        )[which.reshape(source.shape)]

    def with_bandwidth_times(self, factor: float) -> "Cluster":
        """The cluster with the bandwidth of every link multiplied by the factor; infinite bandwidth stays."""
        links = tuple(replace(link, bandwidth=link.bandwidth and link.bandwidth * factor) for link in self.links)
        return replace(self, bandwidth=self.bandwidth and self.bandwidth * factor, links=links)

    def with_instant_messages(self) -> "Cluster":
        """The cluster with messages that take no time on their links."""
        return replace(self, latency=0.0, bandwidth=None, links=())

    def with_cpu_on_links(self) -> "Cluster":
        """The cluster with links as slow as the CPU of ranks is with their largest messages.

        Partitioners compare the time of messages with that of passes by the links.
        """
        if not self.overhead.messages or self.bandwidth is not None:
            return self
        largest = self.overhead.messages[-1]
        seconds = max(largest.send_seconds, largest.receive_seconds)
        return replace(self, bandwidth=largest.bytes / seconds if seconds else None)

    def has_same_ranks_as(self, other: "Cluster") -> bool:
        """Whether the costs of stages on ranks of both clusters are equal."""
        return (self.slowness, self.overhead) == (other.slowness, other.overhead)

    def with_ideal_ranks(self) -> "Cluster":
        """The cluster with ranks on which stages take as long as in the profile."""
        return replace(self, slowness=None, overhead=Overhead())

    def costs_on_ranks(self, costs: StageCosts, placement: Placement, cuts: Cuts) -> StageCosts:
        """The costs of stages on the ranks that hold them: slowed down, and with the seconds of passes and messages.

        Args:
            costs: those of ranks of normal speed, without overhead
            placement: the rank of every stage
            cuts: the edges between stages
        """
        factors = [self.overhead.slowdown * factor for factor in self.slowness_of(placement)]
        if any(factor != 1.0 for factor in factors):
            costs = costs.times(factors)
        return costs.plus(*self._overheads(costs, placement, cuts))

    def costs_without_overhead(self, costs: StageCosts, placement: Placement, cuts: Cuts) -> StageCosts:
        """The inverse of `costs_on_ranks`, except that slowness stays in the costs."""
        forward, backward = self._overheads(costs, placement, cuts)
        costs = costs.plus([-each for each in forward], [-each for each in backward])
        slowdown = self.overhead.slowdown
        return costs if slowdown == 1.0 else costs.times([1 / slowdown] * costs.num_stages)

    def _overheads(self, costs: StageCosts, placement: Placement, cuts: Cuts) -> tuple[list[float], list[float]]:
        """Seconds of overhead per stage, of a forward and of a backward."""
        ranks, overhead = placement.ranks, self.overhead
        values = {(each.producer, each.consumer): each.forward_bytes for each in costs.messages}
        gradients = {(each.consumer, each.producer): each.backward_bytes for each in costs.messages}
        returned = [(consumer, producer) for producer, consumer in cuts.gradient_edges]
        found = []
        for edges, sizes in ((cuts.edges, values), (returned, gradients)):
            seconds = [overhead.pass_seconds] * len(ranks)
            for sender, receiver in edges:
                if ranks[sender] != ranks[receiver]:
                    size = sizes.get((sender, receiver), 0)
                    seconds[sender] += overhead.send_seconds(size)
                    seconds[receiver] += overhead.receive_seconds(size)
            found.append(seconds)
        return found[0], found[1]

    def slowness_of(self, placement: Placement) -> tuple[float, ...]:
        """Per stage, how many times longer its passes take on the rank that holds it."""
        slowness = self.slowness or (1.0,) * placement.num_ranks
        if len(slowness) != placement.num_ranks:
            raise CostError(
                "the cluster must have the same number of ranks", cluster=len(slowness), placement=placement.num_ranks
            )
        return tuple(slowness[rank] for rank in placement.ranks)


def _check_slowness(slowness: object, ranks: int) -> tuple[float, ...]:
    example = ", ".join([*["1"] * (min(ranks, 4) - 1), "1.8"])
    hint = f"slowness=({example}), 1 for a rank of normal speed"
    if not isinstance(slowness, Iterable) or isinstance(slowness, str | bytes):
        raise CostError("slowness must have one factor per rank", slowness=repr(slowness), ranks=ranks, hint=hint)
    factors = tuple(slowness)
    if len(factors) != ranks:
        raise CostError("slowness must have one factor per rank", factors=len(factors), ranks=ranks, hint=hint)
    if not all(is_finite(factor) and factor > 0 for factor in factors):
        raise CostError("slowness must be finite and above 0", slowness=factors, hint=hint)
    return tuple(map(float, factors))
