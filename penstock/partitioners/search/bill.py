"""Bill: what candidates for a stage cost, and what that means for the rank that takes one."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.partitioners.atoms.uses import Floats
from penstock.partitioners.base import Problem


class Bill(NamedTuple):
    """Arrays of one shape, an entry per candidate: seconds of one microbatch, and bytes."""

    seconds: Floats
    received: Floats
    """bytes of the values that come from earlier stages"""
    returned: Floats
    """bytes of the gradients that go back for them"""
    sent: Floats
    """bytes of the values that later stages read, each once"""
    regained: Floats
    """bytes of the gradients that come back for those"""
    parameters: Floats
    state: Floats
    kept: Floats
    """bytes held from forward to backward for one microbatch"""

    @property
    def bytes(self) -> Floats:
        """What a stage adds to the bytes that a cut costs: its messages, and parameters that others hold as well."""
        return self.received + self.returned + self.parameters


@dataclass(frozen=True)
class Rates:
    """What a second and a byte of a candidate mean, per stage."""

    slowness: Floats
    pace: Floats
    """seconds per byte over the links: received, returned, sent, regained"""
    latency: Floats
    overlaps: bool
    in_flight: Floats
    limit: Floats
    """bytes of memory"""

    @classmethod
    def of(cls, problem: Problem) -> "Rates":
        """The rates of every stage on its rank."""
        ranks = problem.placed.ranks
        last = len(ranks) - 1
        around = [(ranks[max(stage - 1, 0)], rank, ranks[min(stage + 1, last)]) for stage, rank in enumerate(ranks)]
        ways = [((before, own), (own, before), (own, after), (after, own)) for before, own, after in around]
        links = {way: _figures(problem, way) for way in {way for each in ways for way in each}}
        pace = [[links[way][0] for way in each] for each in ways]
        latency = [[links[way][1] for way in each] for each in ways]
        return cls(
            problem.slowness_of[list(ranks)],
            np.array(pace),
            np.array(latency) * (not problem.overlaps),
            problem.overlaps,
            problem.in_flight,
            problem.limit_of[list(ranks)],
        )

    @property
    def has_messages(self) -> bool:
        """Whether bytes take time."""
        return bool(self.pace.any() or self.latency.any())

    @property
    def has_limits(self) -> bool:
        """Whether memory is limited."""
        return bool(np.isfinite(self.limit).any())

    @property
    def are_alike(self) -> bool:
        """Whether all ranks take equally long."""
        return bool((self.slowness == self.slowness[0]).all())

    @property
    def are_plain(self) -> bool:
        """Whether only seconds count, and count alike everywhere."""
        return not self.has_messages and not self.has_limits and self.are_alike

    @property
    def without_messages(self) -> "Rates":
        """The same where bytes take no time."""
        return replace(self, pace=0 * self.pace, latency=0 * self.latency)

    def loads(self, bill: Bill) -> Floats:
        """Seconds per stage and candidate; infinite where a candidate alone exceeds the memory of the stage's rank."""
        shape = (-1, *(1,) * bill.seconds.ndim)
        load = self.slowness.reshape(shape) * bill.seconds
        if self.has_messages:
            ways = (bill.received, bill.returned, bill.sent, bill.regained)[: 2 if self.overlaps else 4]
            for way, size in enumerate(ways):
                taken = self.pace[:, way].reshape(shape) * size + self.latency[:, way].reshape(shape) * (size > 0)
                load = np.maximum(load, taken) if self.overlaps else load + taken
        if self.has_limits:
            load = np.where(self.memory(bill) > self.limit.reshape(shape), np.inf, load)
        return load

    def memory(self, bill: Bill) -> Floats:
        """Bytes per stage and candidate."""
        shape = (-1, *(1,) * bill.seconds.ndim)
        return bill.state + self.in_flight.reshape(shape) * bill.kept

    def fullness(self, bill: Bill) -> Floats:
        """Bytes per stage and candidate, as a share of the limit."""
        return self.memory(bill) / self.limit.reshape(-1, *(1,) * bill.seconds.ndim)


def _figures(problem: Problem, way: tuple[int, int]) -> tuple[float, float]:
    """Seconds per byte, and latency, from rank to rank; both 0 within a rank."""
    cluster = problem.cluster
    named = cluster.link(*way) if cluster.links else cluster
    if way[0] == way[1]:
        return 0.0, 0.0
    return 1 / named.bandwidth if named.bandwidth else 0.0, named.latency
