"""judge: what a division into stages means for every rank, in seconds and in bytes."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Floats, Ints, sums
from penstock.partitioners.base import Problem


class Score(NamedTuple):
    """Bytes over the limits of memory, seconds of the busiest rank, bytes that the cuts cost."""

    excess: float
    busiest: float
    cut_bytes: float


@dataclass(frozen=True)
class Judged:
    """Atoms in stages, stages on ranks: the figures of `fold`, summed over the stages of a rank."""

    problem: Problem
    atoms: Atoms
    stage: Ints
    """per atom"""

    @cached_property
    def score(self) -> Score:
        """The smaller the better; rounded, so that equal sums compare equal whatever their order."""
        excess = float(np.maximum(self.memory - self.problem.limit_of, 0).sum()) if self.problem.cluster.limits else 0.0
        return Score(excess, float(f"{self.loads.max():.11g}"), self.cut_bytes)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.problem.num_stages

    @cached_property
    def everyone(self) -> Ints:
        """The stage of every atom, and of the one who reads what the model returns."""
        return np.append(self.stage, self.num_stages - 1)

    @cached_property
    def ranks(self) -> Ints:
        """Per stage."""
        return np.array(self.problem.placed.ranks)

    @cached_property
    def stage_seconds(self) -> Floats:
        """Forward and backward of every stage for one microbatch."""
        free = self.atoms.free
        own = sums(self.stage, self.atoms.seconds, self.num_stages)
        return own + free.uses.sums(self.everyone, self.num_stages, free.seconds)

    @cached_property
    def crossing(self) -> tuple[Ints, Ints, Ints]:
        """Values that go from stage to stage: which, from where, to where."""
        pairs = self.atoms.values.uses.by_stage(self.everyone)
        source = self.stage[self.atoms.values.maker[pairs.thing]]
        chosen = source != pairs.atom
        return pairs.thing[chosen], source[chosen], pairs.atom[chosen]

    @cached_property
    def sent(self) -> tuple[Ints, Ints, Ints]:
        """Those of them that go from rank to rank."""
        value, source, target = self.crossing
        chosen = self.ranks[source] != self.ranks[target]
        return value[chosen], source[chosen], target[chosen]

    @cached_property
    def loads(self) -> Floats:
        """Seconds of every rank."""
        problem, values, number = self.problem, self.atoms.values, self.problem.cluster.ranks
        compute = problem.slowness_of * sums(self.ranks, self.stage_seconds, number)
        value, source, target = self.sent
        owner, user = self.ranks[source], self.ranks[target]
        received = sums(user, values.forward[value] * self._pace(owner, user), number)
        returned = sums(user, values.backward[value] * self._pace(user, owner), number)
        if problem.overlaps:
            return np.maximum(compute, np.maximum(received, returned))
        return compute + received + returned + self._outgoing() + self._waiting()

    def _outgoing(self) -> Floats:
        """Seconds to send what others read, and to take the gradients back, each value once."""
        values, number = self.atoms.values, self.problem.cluster.ranks
        value, first = np.unique(self.sent[0], return_index=True)
        source = self.sent[1][first]
        owner = self.ranks[source]
        user = self.ranks[np.minimum(source + 1, self.num_stages - 1)]
        there = values.forward[value] * self._pace(owner, user)
        return sums(owner, there + values.backward[value] * self._pace(user, owner), number)

    def _waiting(self) -> Floats:
        """Latencies: of a stage's messages in and out, and of the gradients that go back for them."""
        values, link = self.atoms.values, self.problem.cluster.link
        value, source, target = self.sent
        waits = np.zeros(self.problem.cluster.ranks)
        for size, is_back in ((values.forward, False), (values.backward, True)):
            some = size[value] > 0
            for stages, step in ((target[some], -1), (source[some], 1)):
                for stage in np.unique(stages):
                    own, peer = self.ranks[stage], self.ranks[np.clip(stage + step, 0, self.num_stages - 1)]
                    way = (own, peer) if (step > 0) != is_back else (peer, own)
                    waits[own] += link(*way).latency if own != peer else 0.0
        return waits

    def _pace(self, source: Ints, target: Ints) -> Floats:
        """Seconds per byte from rank to rank."""
        cluster = self.problem.cluster
        if not cluster.links:
            return np.full(len(source), 1 / cluster.bandwidth if cluster.bandwidth else 0.0)
        pairs, which = np.unique(source * cluster.ranks + target, return_inverse=True)
        links = [cluster.link(*divmod(int(pair), cluster.ranks)) for pair in pairs]
        return np.array([1 / link.bandwidth if link.bandwidth else 0.0 for link in links])[which]

    @cached_property
    def memory(self) -> Floats:
        """Bytes of every rank: state, and the activations of the microbatches in flight."""
        free, tensors, held, number = self.atoms.free, self.atoms.tensors, self.atoms.held, self.num_stages
        kept = sums(self.stage, self.atoms.kept, number)
        kept += free.uses.sums(self.everyone, number, free.kept)
        if held.is_known:
            kept += held.uses.sums(self.everyone, number, held.sizes)
        else:
            value, _, target = self.crossing
            kept += sums(target, self.atoms.values.forward[value], number)
        state = tensors.uses.sums(self.everyone, number, tensors.state)
        return sums(self.ranks, state + self.problem.in_flight * kept, self.problem.cluster.ranks)

    @cached_property
    def cut_bytes(self) -> float:
        """Bytes between ranks, both ways, and those of parameters that further ranks hold."""
        values, tensors = self.atoms.values, self.atoms.tensors
        value = self.sent[0]
        holders = tensors.uses.by_stage(self.ranks[self.everyone])
        held = float(tensors.parameters[holders.thing].sum() - tensors.parameters[np.unique(holders.thing)].sum())
        return float(values.forward[value].sum() + values.backward[value].sum()) + held
