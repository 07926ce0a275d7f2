"""Computes how good a partition is: seconds and bytes of every rank, and a lower bound; builds the Division."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Floats, Ints, Partition
from penstock.partitioners.atoms import Atoms, sums
from penstock.partitioners.base import Division, Problem


class ScoreKey(NamedTuple):
    """Bytes over the limits of memory, seconds of the busiest rank, bytes that the cuts cost: smaller is better."""

    excess: float
    busiest: float
    cut_bytes: float


@dataclass(frozen=True, eq=False)
class Score:
    """Atoms in stages and stages on ranks, with the costs of `penstock.ir.compute_stage_costs`, summed per rank.

    Scores compare by their keys, so that `min` returns the best of several and the first of equals.
    """

    problem: Problem
    atoms: Atoms
    stage: Ints
    """per atom"""

    def __lt__(self, other: "Score") -> bool:
        return self.key < other.key

    @cached_property
    def key(self) -> ScoreKey:
        """Rounded, so that equal sums compare equal whatever their order."""
        excess = float(np.maximum(self.memory - self.problem.limit_of, 0).sum()) if self.problem.cluster.limits else 0.0
        return ScoreKey(excess, float(f"{self.loads.max():.11g}"), self.cut_bytes)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.problem.num_stages

    @cached_property
    def stage_of(self) -> Ints:
        """The stage of every atom, and of the reader of the model's outputs."""
        return np.append(self.stage, self.num_stages - 1)

    @cached_property
    def ranks(self) -> Ints:
        """The rank of every stage."""
        return np.array(self.problem.placed.ranks)

    @cached_property
    def stage_seconds(self) -> Floats:
        """Forward and backward of every stage for one microbatch."""
        inputs = self.atoms.input_only
        own = sums(self.stage, self.atoms.seconds, self.num_stages)
        return own + inputs.uses.sums(self.stage_of, self.num_stages, inputs.seconds)

    @cached_property
    def compute_loads(self) -> Floats:
        """Seconds of compute of every rank."""
        slowness = self.problem.slowness_of
        return slowness * np.bincount(self.ranks, self.stage_seconds, minlength=len(slowness))

    @cached_property
    def crossing(self) -> tuple[Ints, Ints, Ints]:
        """Values that go from stage to stage: the value, its source stage, its target stage."""
        pairs = self.atoms.values.uses.by_stage(self.stage_of)
        source = self.stage[self.atoms.values.maker[pairs.item]]
        chosen = source != pairs.atom
        return pairs.item[chosen], source[chosen], pairs.atom[chosen]

    @cached_property
    def sent(self) -> tuple[Ints, Ints, Ints]:
        """Those of the crossing values that go from rank to rank."""
        value, source, target = self.crossing
        chosen = self.ranks[source] != self.ranks[target]
        return value[chosen], source[chosen], target[chosen]

    @cached_property
    def loads(self) -> Floats:
        """Seconds of every rank, messages included."""
        values, number = self.atoms.values, self.problem.cluster.ranks
        value, source, target = self.sent
        owner, user = self.ranks[source], self.ranks[target]
        rates = self.problem.cluster.link_rates
        received = sums(user, rates(owner, user).occupied(values.forward[value]), number)
        grads_sent = sums(user, rates(user, owner).occupied(values.backward[value]), number)
        if self.problem.overlaps:
            return np.maximum(self.compute_loads, np.maximum(received, grads_sent))
        return self.compute_loads + received + grads_sent + self._sending() + self._latencies()

    def _sending(self) -> Floats:
        """Seconds to send values that others read, and to receive their gradients, each value once."""
        values, number = self.atoms.values, self.problem.cluster.ranks
        value, first = np.unique(self.sent[0], return_index=True)
        source = self.sent[1][first]
        owner = self.ranks[source]
        # Once, however many stages read it, and over the link to the next stage, as in CostRates.
        user = self.ranks[np.minimum(source + 1, self.num_stages - 1)]
        rates = self.problem.cluster.link_rates
        sending = rates(owner, user).occupied(values.forward[value])
        receiving = rates(user, owner).occupied(values.backward[value])
        return sums(owner, sending + receiving, number)

    def _latencies(self) -> Floats:
        """Latencies of a stage's messages in and out, and of the gradients for them."""
        values, rates = self.atoms.values, self.problem.cluster.link_rates
        value, source, target = self.sent
        waits = np.zeros(self.problem.cluster.ranks)
        for size, is_gradient in ((values.forward, False), (values.backward, True)):
            has_bytes = size[value] > 0
            # As in CostRates, all messages of a stage count as one to or from the stage beside it.
            for stages, step in ((target[has_bytes], -1), (source[has_bytes], 1)):
                stage = np.unique(stages)
                own, peer = self.ranks[stage], self.ranks[np.clip(stage + step, 0, self.num_stages - 1)]
                is_outgoing = (step > 0) != is_gradient
                links = rates(own, peer) if is_outgoing else rates(peer, own)
                np.add.at(waits, own, links.times(own != peer).latency)
        return waits

    @cached_property
    def memory(self) -> Floats:
        """Bytes of every rank: state, and the activations of the microbatches in flight."""
        inputs, tensors, saved, number = self.atoms.input_only, self.atoms.tensors, self.atoms.saved, self.num_stages
        kept = sums(self.stage, self.atoms.kept, number)
        kept += inputs.uses.sums(self.stage_of, number, inputs.kept)
        if saved.is_known:
            kept += saved.uses.sums(self.stage_of, number, saved.sizes)
        else:
            value, _, target = self.crossing
            kept += sums(target, self.atoms.values.forward[value], number)
        state = tensors.uses.sums(self.stage_of, number, tensors.state)
        return sums(self.ranks, state + self.problem.in_flight_of * kept, self.problem.cluster.ranks)

    @cached_property
    def cut_bytes(self) -> float:
        """Bytes between ranks, both ways, and those of parameters that more than one rank holds."""
        values, tensors = self.atoms.values, self.atoms.tensors
        value = self.sent[0]
        holders = tensors.uses.by_stage(self.ranks[self.stage_of])
        held = float(tensors.parameters[holders.item].sum() - tensors.parameters[np.unique(holders.item)].sum())
        return float(values.forward[value].sum() + values.backward[value].sum()) + held


def lower_bound(problem: Problem) -> float:
    """Returns a lower bound of the bottleneck of any partition: an even share of the work, or the longest atoms."""
    ranks = sorted(set(problem.placed.ranks))
    slowness = problem.slowness_of[ranks]
    atoms = problem.atoms
    work = float(atoms.seconds.sum() + atoms.input_only.seconds.sum())
    # Pigeonhole: of the k * ranks + 1 longest atoms, k + 1 share a rank, at best the shortest of them.
    longest = np.sort(atoms.seconds)[::-1]
    prefix = np.concatenate(([0.0], np.cumsum(longest)))
    k = np.arange((len(longest) - 1) // len(ranks) + 1)
    together = float((prefix[k * len(ranks) + 1] - prefix[k * len(ranks) - k]).max())
    return max(work / float((1 / slowness).sum()), together * float(slowness.min()))


def division(
    problem: Problem,
    stage: Ints,
    why: str,
    *,
    bound: float = 0.0,
    contiguous_bound: float = 0.0,
    keeps_limits: bool = True,
) -> Division:
    """Returns the Division for the stage of every atom, or raises PartitionError if a rank exceeds its memory.

    `bound` and `contiguous_bound` are proven bounds, for any partition and for runs of the atoms. `keeps_limits` is
    False for a partitioner that ignores limits of memory.
    """
    score = Score(problem, problem.atoms, stage)
    excess = score.memory - problem.limit_of
    if excess.max() > 0:
        rank = int(excess.argmax())
        ways_out = "more ranks, fewer microbatches in flight, recomputation, or an optimizer that holds less"
        raise PartitionError(
            f"{'no cut was found that keeps' if keeps_limits else 'the cut exceeds'} the limits of memory",
            rank=rank,
            needs=round(score.memory[rank]),
            limit=round(problem.limit_of[rank]),
            short_by=round(excess[rank]),
            all_ranks_need=round(score.memory.sum()),
            hint=ways_out if keeps_limits else f"linear or auto, which keep limits in mind; {ways_out}",
        )
    busiest = float(score.loads.max())
    least = min(max(lower_bound(problem), bound), busiest)
    return Division(
        partition_of(problem, problem.atoms, stage),
        problem.placed,
        tuple(score.loads.tolist()),
        least,
        busiest if math.isclose(contiguous_bound, busiest, rel_tol=1e-9) else max(least, contiguous_bound),
        round(score.cut_bytes),
        why,
    )


def partition_of(problem: Problem, atoms: Atoms, stage: Ints) -> Partition:
    """Returns the nodes of every stage in the graph's order; input-only ones are with the first stage to need them."""
    number = int(stage.max()) + 1
    stage_of = np.append(stage, number - 1)
    places: list[list[int]] = [[] for _ in range(number)]
    for nodes, at in zip(atoms.nodes, stage.tolist(), strict=True):
        places[at] += nodes
    inputs = atoms.input_only
    first = np.full(len(inputs.nodes), number)
    np.minimum.at(first, inputs.uses.item, stage_of[inputs.uses.atom])
    owner = np.where(inputs.home >= 0, stage_of[inputs.home], first)
    for place, at in zip(inputs.nodes, owner.tolist(), strict=True):
        places[at].append(place)
    names = [node.name for node in problem.graph.nodes]
    return Partition(tuple(tuple(names[place] for place in sorted(nodes)) for nodes in places))
