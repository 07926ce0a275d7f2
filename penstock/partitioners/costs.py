"""Computes the costs of many candidate stages at once, each a run of consecutive atoms, and their seconds on a rank.

The costs are those of `ir/costs.py`, which computes them for the stages of one partition.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.ir import Floats, Ints, LinkRates
from penstock.partitioners.atoms import Atoms, Incidence
from penstock.partitioners.base import Problem


class CandidateCosts(NamedTuple):
    """Costs of candidate stages for one microbatch: arrays of one shape, an entry per candidate."""

    seconds: Floats
    received: Floats
    """bytes of values from earlier stages"""
    grads_sent: Floats
    """bytes of their gradients, sent back to those stages"""
    sent: Floats
    """bytes of values that later stages read, each once"""
    grads_received: Floats
    """bytes of the gradients of the sent values"""
    parameters: Floats
    state: Floats
    kept: Floats
    """bytes held from forward to backward"""

    @property
    def bytes(self) -> Floats:
        """A stage's share of the bytes of a cut: its messages, and parameters that other stages may hold as well."""
        return self.received + self.grads_sent + self.parameters


@dataclass(frozen=True)
class CostRates:
    """Converts a CandidateCosts to seconds and bytes on the rank of each stage."""

    slowness: Floats
    links: LinkRates
    """per stage, of the links for the bytes received, grads_sent, sent and grads_received, in this order"""
    overlaps: bool
    """whether messages travel while ranks compute, see Problem.overlaps"""
    in_flight: Floats
    limit: Floats
    """bytes of memory"""

    @classmethod
    def of(cls, problem: Problem) -> "CostRates":
        """Returns the rates of every stage on its rank; links are those to the ranks of the stages beside it."""
        ranks = np.array(problem.placed.ranks)
        before, after = np.append(ranks[:1], ranks[:-1]), np.append(ranks[1:], ranks[-1:])
        source = np.stack((before, ranks, ranks, after), axis=1)
        target = np.stack((ranks, before, after, ranks), axis=1)
        # Between stages of one rank nothing is sent.
        links = problem.cluster.link_rates(source, target).times(source != target)
        return cls(
            problem.slowness_of[ranks],
            links,
            problem.overlaps,
            problem.in_flight_of,
            problem.limit_of[ranks],
        )

    @cached_property
    def has_messages(self) -> bool:
        """Whether messages take time."""
        return bool(self.message_seconds(self.links, np.ones(1)).any())

    @cached_property
    def has_limits(self) -> bool:
        """Whether memory is limited."""
        return bool(np.isfinite(self.limit).any())

    @property
    def is_homogeneous(self) -> bool:
        """Whether all ranks are equally fast."""
        return bool((self.slowness == self.slowness[0]).all())

    @property
    def is_compute_only(self) -> bool:
        """Whether only compute seconds count, with the same rate on all ranks."""
        return not self.has_messages and not self.has_limits and self.is_homogeneous

    @property
    def without_messages(self) -> "CostRates":
        """The same with messages that take no time."""
        return replace(self, links=self.links.times(0))

    def message_seconds(self, links: LinkRates, num_bytes: Floats) -> Floats:
        """Returns the seconds that messages count for; a latency hidden by compute does not."""
        return links.occupied(num_bytes) if self.overlaps else links.total(num_bytes)

    def loads(self, cost: CandidateCosts) -> Floats:
        """Returns seconds per stage and candidate; inf where a candidate alone exceeds the memory of the rank."""
        shape = (-1, *(1,) * cost.seconds.ndim)
        load = self.slowness.reshape(shape) * cost.seconds
        if self.has_messages:
            # With overlap only the busiest stage counts, and values sent are those that a later stage receives.
            ways = (cost.received, cost.grads_sent, cost.sent, cost.grads_received)[: 2 if self.overlaps else 4]
            for way, num_bytes in enumerate(ways):
                per_stage = (slice(None), way, *(None,) * num_bytes.ndim)
                seconds = self.message_seconds(self.links[per_stage], num_bytes)
                load = np.maximum(load, seconds) if self.overlaps else load + seconds
        if self.has_limits:
            load = np.where(self.memory(cost) > self.limit.reshape(shape), np.inf, load)
        return load

    def memory(self, cost: CandidateCosts) -> Floats:
        """Returns bytes per stage and candidate."""
        shape = (-1, *(1,) * cost.seconds.ndim)
        return cost.state + self.in_flight.reshape(shape) * cost.kept

    def memory_shares(self, cost: CandidateCosts) -> Floats:
        """Returns bytes per stage and candidate, as a share of the limit."""
        return self.memory(cost) / self.limit.reshape(-1, *(1,) * cost.seconds.ndim)


class Box(NamedTuple):
    """All runs that start at atom `first` .. `last` and end before atom `low` .. `high`, limits included."""

    first: int
    last: int
    low: int
    high: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of starts and number of ends."""
        return self.last - self.first + 1, self.high - self.low + 1


@dataclass(frozen=True)
class SharedWeights:
    """Sums over the items that runs use, each item counted once per run, for all runs of a box at once.

    A weight counts for the runs that start after `before`, not after `place`, and end after `place`. So an item used
    by atoms 2, 5 and 9 has the windows (-1, 2), (2, 5) and (5, 9): of the users inside a run exactly one counts, the
    first.
    """

    before: Ints
    place: Ints
    weight: Floats

    @classmethod
    def of(cls, uses: Incidence, weights: Floats, num_atoms: int, maker: Ints | None = None) -> "SharedWeights":
        """Counts items for every run that uses them; with `maker`, only for runs that start after the item's maker."""
        place = np.minimum(uses.atom, num_atoms - 1)
        is_first = np.diff(uses.item, prepend=-1) != 0
        origin = np.full(len(place), -1, dtype=np.int64) if maker is None else maker[uses.item]
        before = np.where(is_first, origin, np.roll(place, 1))
        by_place = np.argsort(place, kind="stable")
        weight = weights[uses.item]
        chosen = by_place[(before < place)[by_place] & (weight != 0)[by_place]]
        return cls(before[chosen], place[chosen], weight[chosen])

    def __len__(self) -> int:
        return len(self.place)

    def over(self, box: Box) -> Floats:
        """Returns the sum of every run of the box: a row per start, a column per end."""
        rows, columns = box.shape
        if not len(self):
            return np.zeros((rows, columns))
        near = slice(*np.searchsorted(self.place, (box.first, box.high)))
        before, place, weight = self.before[near], self.place[near], self.weight[near]
        inside = before < box.last
        before, place, weight = before[inside], place[inside], weight[inside]
        # A window is a rectangle of starts and ends: mark its corners, then sum along both axes.
        top = np.maximum(before + 1 - box.first, 0)
        bottom = np.minimum(place - box.first, rows - 1) + 1
        left = np.maximum(place + 1 - box.low, 0)
        change = np.bincount(top * columns + left, weight, minlength=(rows + 1) * columns)
        change -= np.bincount(bottom * columns + left, weight, minlength=(rows + 1) * columns)
        return change.reshape(rows + 1, columns)[:rows].cumsum(axis=0).cumsum(axis=1)


@dataclass(frozen=True)
class RunWeights:
    """The weight of runs whose atoms have weights of their own and share items; longer runs weigh more."""

    prefix: Floats
    """prefix sums: the own weight of all atoms before each place"""
    shared: SharedWeights

    @classmethod
    def of(cls, own: Floats, uses: Incidence, weights: Floats) -> "RunWeights":
        """Adds items that a single atom uses to the atom's own weight, so that fewer are shared."""
        number = len(own)
        atom = np.minimum(uses.atom, number - 1)
        users = np.bincount(uses.item, minlength=len(weights))
        alone = users[uses.item] == 1
        own = own + np.bincount(atom[alone], weights[uses.item[alone]], minlength=number)
        rest = Incidence(uses.item[~alone], uses.atom[~alone])
        return cls(np.concatenate(([0.0], np.cumsum(own))), SharedWeights.of(rest, weights, number))

    def over(self, box: Box) -> Floats:
        """Returns the weight of every run of a box."""
        own = self.prefix[None, box.low : box.high + 1] - self.prefix[box.first : box.last + 1, None]
        return own + self.shared.over(box) if len(self.shared) else own

    def of_run(self, start: int, end: int) -> float:
        """Returns the weight of one run."""
        if not len(self.shared):
            return self._prefix[end] - self._prefix[start]
        return float(self.over(Box(start, start, end, end))[0, 0])

    def last_end(self, start: int, limit: float) -> int:
        """Returns the last place at which a run from `start` may end without exceeding the limit."""
        prefix = self._prefix
        end = bisect_right(prefix, prefix[start] + limit, start) - 1
        # The sum in the bisection and the difference that counts are rounded differently.
        while end < len(prefix) - 1 and prefix[end + 1] - prefix[start] <= limit:
            end += 1
        while prefix[end] - prefix[start] > limit:
            end -= 1
        if not len(self.shared):
            return end
        return start - 1 + bisect_right(self.over(Box(start, start, start, end))[0].tolist(), limit)

    def first_start(self, end: int, limit: float) -> int:
        """Returns the first place at which a run to `end` may start without exceeding the limit."""
        prefix = self._prefix
        start = bisect_left(prefix, prefix[end] - limit, 0, end)
        while start > 0 and prefix[end] - prefix[start - 1] <= limit:
            start -= 1
        while prefix[end] - prefix[start] > limit:
            start += 1
        if not len(self.shared):
            return start
        falling = self.over(Box(start, end, end, end))[:, 0]
        return start + bisect_left((-falling).tolist(), -limit)

    @cached_property
    def _prefix(self) -> list[float]:
        # Scalars are read from a list, which is several times faster than from an array.
        values: list[float] = self.prefix.tolist()
        return values


@dataclass(frozen=True)
class Runs:
    """The runs of atoms in their order; a run from `start` to `end` holds the atoms start, ..., end - 1."""

    atoms: Atoms

    @cached_property
    def seconds(self) -> RunWeights:
        """Seconds; input-only nodes count for every run that needs them."""
        inputs = self.atoms.input_only
        return RunWeights.of(self.atoms.seconds, inputs.uses, inputs.seconds)

    def bytes(self, box: Box) -> Floats:
        """Returns the share of each run in the bytes of a cut."""
        return self._received[0].over(box) + self._received[1].over(box) + self._parameters.over(box)

    @cached_property
    def bytes_to_end(self) -> Floats:
        """Per place the bytes of the run from there to the end, which are those that a cut there costs."""
        number = len(self.atoms)
        return self.bytes(Box(0, number, number, number))[:, 0]

    def costs(self, box: Box, with_sent: bool = False) -> CandidateCosts:
        """Returns all costs; bytes sent are 0 unless asked for."""
        nothing = np.zeros(box.shape)
        sent, grads_received = (window.over(box) for window in self._sent) if with_sent else (nothing, nothing)
        received, grads_sent = (window.over(box) for window in self._received)
        return CandidateCosts(
            self.seconds.over(box),
            received,
            grads_sent,
            sent,
            grads_received,
            self._parameters.over(box),
            self._held[0].over(box),
            self._kept.over(box) + (self._held[1].over(box) if self.atoms.saved.is_known else received),
        )

    @cached_property
    def _kept(self) -> RunWeights:
        inputs = self.atoms.input_only
        return RunWeights.of(self.atoms.kept, inputs.uses, inputs.kept)

    @cached_property
    def _parameters(self) -> SharedWeights:
        return SharedWeights.of(self.atoms.tensors.uses, self.atoms.tensors.parameters, len(self.atoms))

    @cached_property
    def _held(self) -> tuple[SharedWeights, SharedWeights]:
        """Of state and of saved values."""
        tensors, saved = self.atoms.tensors, self.atoms.saved
        pairs = ((tensors.uses, tensors.state), (saved.uses, saved.sizes))
        state, values = (SharedWeights.of(uses, sizes, len(self.atoms)) for uses, sizes in pairs)
        return state, values

    @cached_property
    def _received(self) -> tuple[SharedWeights, SharedWeights]:
        """Of values from earlier stages, and of their gradients."""
        values = self.atoms.values
        forward, backward = (
            SharedWeights.of(values.uses, weights, len(self.atoms), values.maker)
            for weights in (values.forward, values.backward)
        )
        return forward, backward

    @cached_property
    def _sent(self) -> tuple[SharedWeights, SharedWeights]:
        """Of values that later stages read, each once, and of their gradients."""
        values = self.atoms.values
        last = np.full(len(values.maker), -1, dtype=np.int64)
        np.maximum.at(last, values.uses.item, np.minimum(values.uses.atom, len(self.atoms) - 1))
        used = last > values.maker
        maker, last = values.maker[used], last[used]
        # A value counts for the runs that hold its maker but not its last reader. As windows: runs with the maker, less
        # runs with the last reader, plus runs with the last reader but not the maker.
        nowhere = np.full(len(maker), -1, dtype=np.int64)
        before, place = np.concatenate((nowhere, nowhere, maker)), np.concatenate((maker, last, last))
        by_place = np.argsort(place, kind="stable")
        forward, backward = (
            SharedWeights(before[by_place], place[by_place], np.concatenate((size, -size, size))[by_place])
            for size in (values.forward[used], values.backward[used])
        )
        return forward, backward
