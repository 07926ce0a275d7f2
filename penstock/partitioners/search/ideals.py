"""Finds the best partition of a model with few branches by enumerating chains of ideals.

An ideal is a set of atoms that contains, with an atom, all atoms that it reads from: a prefix of the model in some
order of its branches. A chain of n blocks has n + 1 of them; k parallel branches of length l have (l + 1) ** k. Where
they can be enumerated, the best partition is the best chain of ideals, and no partition is better.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.partitioners.atoms import Atoms, Bools, Floats, Incidence, Ints
from penstock.partitioners.costs import StageCost
from penstock.partitioners.search.contiguous import Level

_PAIRS = 1_000_000
"""pairs of ideals that are costed at once, to bound memory"""


def all_ideals(atoms: Atoms, most: int) -> Bools | None:
    """Returns a row per ideal, smaller ones first, and a column per atom; None if there are more than `most`."""
    number = len(atoms)
    needs = [sum(1 << int(before) for before in found) for found in atoms.predecessors]
    followers = [found.tolist() for found in atoms.successors]
    # Ideals are bit masks; each comes with the atoms that can be added to it.
    level = {0: [atom for atom in range(number) if not needs[atom]]}
    found = [0]
    while level:
        following: dict[int, list[int]] = {}
        for ideal, ready in level.items():
            for atom in ready:
                larger = ideal | 1 << atom
                if larger not in following:
                    opened = [other for other in followers[atom] if not needs[other] & ~larger]
                    following[larger] = [other for other in ready if other != atom] + opened
        found += following
        if len(found) > most:
            return None
        level = following
    width = (number + 7) // 8
    packed = np.frombuffer(b"".join(ideal.to_bytes(width, "little") for ideal in found), dtype=np.uint8)
    return np.unpackbits(packed.reshape(-1, width), axis=1, bitorder="little")[:, :number].astype(np.bool_)


@dataclass(frozen=True)
class _ItemSums:
    """Sums over the items that the difference of two ideals uses, each once, unless it also has the item's maker."""

    begin: Floats
    """per ideal and use: 1 if exactly the uses before this one are inside"""
    end: Floats
    """per ideal and use: the weight of the item if this use is inside as well"""
    total: Floats
    """per ideal the weight inside of items that a single atom uses"""

    @classmethod
    def of(cls, inside: Bools, uses: Incidence, weights: Floats, maker: Ints | None = None) -> "_ItemSums":
        # Uses of an item need only be counted: the larger ideal has more of them, or the difference has none.
        is_lone = (np.bincount(uses.item, minlength=len(weights))[uses.item] == 1) & (maker is None)
        total = inside[:, uses.atom[is_lone]] @ weights[uses.item[is_lone]]
        item, atom = uses.item[~is_lone], uses.atom[~is_lone]
        if not len(item):
            nothing = np.zeros((len(inside), 0))
            return cls(nothing, nothing, total)
        first = np.flatnonzero(np.diff(item, prepend=-1))
        lengths = np.diff(np.append(first, len(item)))
        count = np.repeat(np.add.reduceat(inside[:, atom].astype(np.int64), first, axis=1), lengths, axis=1)
        before = np.arange(len(item)) - np.repeat(first, lengths)
        begin = count == before
        if maker is not None:
            begin &= inside[:, maker[item]]
        return cls(begin.astype(np.float64), (count > before) * weights[item], total)

    def between(self, begins: slice, ends: slice) -> Floats:
        alone = self.total[ends] - self.total[begins][:, None]
        return alone + self.begin[begins] @ self.end[ends].T if self.begin.shape[1] else alone


@dataclass(frozen=True)
class Ideals:
    """The ideals of some atoms, and the costs of the stages between two of them."""

    atoms: Atoms
    inside: Bools
    """a row per ideal, a column per atom, as `all_ideals` returns them"""
    with_sent: bool = False
    """whether to work out bytes sent, which count only if messages do not overlap with compute"""

    def levels(self) -> Iterator[Level]:
        """Yields every ideal as an end, with all smaller ones as starts."""
        sizes = self.inside.sum(axis=1)
        lows = np.flatnonzero(np.diff(sizes, prepend=-1)).tolist()
        for low, high in zip(lows, [*lows[1:], len(sizes)], strict=True):
            step = max(_PAIRS // max(low, 1), 1)
            for start in range(low, high, step) if low else ():
                begins, ends = slice(0, low), slice(start, min(start + step, high))
                cost = self.costs(begins, ends)
                is_part = self._inside[begins] @ (1 - self._inside[ends]).T == 0
                cost = cost._replace(seconds=np.where(is_part, cost.seconds, np.inf))
                yield Level(np.arange(low), np.arange(ends.start, ends.stop), cost)

    def costs(self, begins: slice, ends: slice) -> StageCost:
        """Returns the costs of stages: a row per begin, a column per end."""
        values = self.atoms.values
        shared = {name: each.between(begins, ends) for name, each in self._item_sums.items()}
        nothing = 0 * shared["received"]
        kept = self._kept[ends] - self._kept[begins][:, None] + shared["inputs_kept"]
        return StageCost(
            self._seconds[ends] - self._seconds[begins][:, None] + shared["inputs_seconds"],
            shared["received"],
            shared["returned"],
            self._sent(begins, ends, values.forward) if self.with_sent else nothing,
            self._sent(begins, ends, values.backward) if self.with_sent else nothing,
            shared["parameters"],
            shared["state"],
            kept + (shared["saved"] if self.atoms.saved.is_known else shared["received"]),
        )

    @cached_property
    def _item_sums(self) -> dict[str, _ItemSums]:
        values, tensors, inputs, saved = self.atoms.values, self.atoms.tensors, self.atoms.input_only, self.atoms.saved
        shared = {
            "inputs_seconds": (inputs.uses, inputs.seconds),
            "inputs_kept": (inputs.uses, inputs.kept),
            "parameters": (tensors.uses, tensors.parameters),
            "state": (tensors.uses, tensors.state),
            "saved": (saved.uses, saved.sizes),
        }
        sent = {"received": values.forward, "returned": values.backward}
        return {
            **{name: _ItemSums.of(self._with_reader, *each) for name, each in shared.items()},
            **{name: _ItemSums.of(self._with_reader, values.uses, size, values.maker) for name, size in sent.items()},
        }

    def _sent(self, begins: slice, ends: slice, weights: Floats) -> Floats:
        """Bytes of values that are made in the stage and read after it."""
        return (1 - self._made[begins]) @ (self._made[ends] * self._is_open[ends] * weights).T

    @cached_property
    def _made(self) -> Floats:
        """Per ideal and value: 1 if it is made inside."""
        return self._inside[:, self.atoms.values.maker]

    @cached_property
    def _is_open(self) -> Bools:
        """Per ideal and value: whether an atom outside reads it."""
        uses = self.atoms.values.uses
        readers = np.zeros((len(self.atoms) + 1, len(self.atoms.values.maker)))
        readers[uses.atom, uses.item] = 1
        result: Bools = (1 - self._with_reader) @ readers > 0
        return result

    @cached_property
    def _with_reader(self) -> Bools:
        """With a column for the reader of the model's outputs, which is inside only once everything else is."""
        return np.column_stack((self.inside, self.inside.all(axis=1)))

    @cached_property
    def _inside(self) -> Floats:
        return self.inside.astype(np.float64)

    @cached_property
    def _seconds(self) -> Floats:
        return self._inside @ self.atoms.seconds

    @cached_property
    def _kept(self) -> Floats:
        return self._inside @ self.atoms.kept
