"""Ideals: every beginning of the model that a cut may lie behind, in whatever order its branches are run.

An ideal is a set of atoms that holds, with an atom, all that it reads from. A chain of blocks has as many as it has
places; k branches of length l side by side have (l + 1) ** k. Where they can be counted, the best partition is the best
chain of ideals, and no partition at all is better.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Bools, Floats, Ints, Uses
from penstock.partitioners.search.bill import Bill
from penstock.partitioners.search.minimax import Level

_PAIRS = 1_000_000


def all_ideals(atoms: Atoms, most: int) -> Bools | None:
    """A row per ideal, smaller ones first, and a column per atom; None if there are more than `most`."""
    number = len(atoms)
    needs = [sum(1 << int(before) for before in found) for found in atoms.predecessors]
    followers = [found.tolist() for found in atoms.successors]
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
class Sharing:
    """Things that a difference of two ideals pays for, once, if it has any of their users, and not their maker."""

    begin: Floats
    """per ideal and use: whether exactly the uses before this one are inside already"""
    end: Floats
    """per ideal and use: the weight of the thing, if this one is inside as well"""
    total: Floats
    """per ideal what belongs to one atom each, and is inside"""

    @classmethod
    def of(cls, inside: Bools, uses: Uses, weights: Floats, maker: Ints | None = None) -> "Sharing":
        """Uses of a thing are counted, not told apart: more of them are in the larger ideal, or none is in between."""
        is_lone = (np.bincount(uses.thing, minlength=len(weights))[uses.thing] == 1) & (maker is None)
        total = inside[:, uses.atom[is_lone]] @ weights[uses.thing[is_lone]]
        thing, atom = uses.thing[~is_lone], uses.atom[~is_lone]
        if not len(thing):
            nothing = np.zeros((len(inside), 0))
            return cls(nothing, nothing, total)
        first = np.flatnonzero(np.diff(thing, prepend=-1))
        lengths = np.diff(np.append(first, len(thing)))
        count = np.repeat(np.add.reduceat(inside[:, atom].astype(np.int64), first, axis=1), lengths, axis=1)
        before = np.arange(len(thing)) - np.repeat(first, lengths)
        begin = count == before
        if maker is not None:
            begin &= inside[:, maker[thing]]
        return cls(begin.astype(np.float64), (count > before) * weights[thing], total)

    def over(self, begins: slice, ends: slice) -> Floats:
        """The sum of every pair of ideals, of which the second holds the first."""
        alone = self.total[ends] - self.total[begins][:, None]
        return alone + self.begin[begins] @ self.end[ends].T if self.begin.shape[1] else alone


@dataclass(frozen=True)
class Ideals:
    """The ideals of some atoms, and what the stages between two of them cost."""

    atoms: Atoms
    inside: Bools
    with_sent: bool = False

    def levels(self) -> Iterator[Level]:
        """Every ideal as an end, with all smaller ones as begins."""
        sizes = self.inside.sum(axis=1)
        for low, high in zip(*_spans(sizes), strict=True):
            step = max(_PAIRS // max(low, 1), 1)
            for start in range(low, high, step) if low else ():
                begins, ends = slice(0, low), slice(start, min(start + step, high))
                bill = self.bill(begins, ends)
                is_part = self._inside[begins] @ (1 - self._inside[ends]).T == 0
                bill = bill._replace(seconds=np.where(is_part, bill.seconds, np.inf))
                yield Level(np.arange(low), np.arange(ends.start, ends.stop), bill)

    def bill(self, begins: slice, ends: slice) -> Bill:
        """A row per begin, a column per end."""
        values, sharing = self.atoms.values, self._sharing
        figures = {name: each.over(begins, ends) for name, each in sharing.items()}
        nothing = 0 * figures["received"]
        kept = _between(self._kept, begins, ends) + figures["free_kept"]
        return Bill(
            _between(self._seconds, begins, ends) + figures["free_seconds"],
            figures["received"],
            figures["returned"],
            self._sent(begins, ends, values.forward) if self.with_sent else nothing,
            self._sent(begins, ends, values.backward) if self.with_sent else nothing,
            figures["parameters"],
            figures["state"],
            kept + (figures["held"] if self.atoms.held.is_known else figures["received"]),
        )

    @cached_property
    def _sharing(self) -> dict[str, Sharing]:
        values, tensors, free, held = self.atoms.values, self.atoms.tensors, self.atoms.free, self.atoms.held
        shared = {
            "free_seconds": (free.uses, free.seconds),
            "free_kept": (free.uses, free.kept),
            "parameters": (tensors.uses, tensors.parameters),
            "state": (tensors.uses, tensors.state),
            "held": (held.uses, held.sizes),
        }
        sent = {"received": values.forward, "returned": values.backward}
        return {
            **{name: Sharing.of(self._everyone, *each) for name, each in shared.items()},
            **{name: Sharing.of(self._everyone, values.uses, size, values.maker) for name, size in sent.items()},
        }

    def _sent(self, begins: slice, ends: slice, weights: Floats) -> Floats:
        """Values made in the stage of which a reader is still to come."""
        made = self._made
        return (1 - made[begins]) @ (made[ends] * self._is_open[ends] * weights).T

    @cached_property
    def _made(self) -> Floats:
        """Per ideal and value: whether it is made inside."""
        return self._inside[:, self.atoms.values.maker]

    @cached_property
    def _is_open(self) -> Bools:
        """Per ideal and value: whether somebody outside reads it."""
        uses = self.atoms.values.uses
        readers = np.zeros((len(self.atoms) + 1, len(self.atoms.values.maker)))
        readers[uses.atom, uses.thing] = 1
        result: Bools = (1 - self._everyone) @ readers > 0
        return result

    @cached_property
    def _everyone(self) -> Bools:
        """With one who reads what the model returns, and is inside with everything else only."""
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


def _between(total: Floats, begins: slice, ends: slice) -> Floats:
    return total[ends] - total[begins][:, None]


def _spans(sizes: Ints) -> tuple[list[int], list[int]]:
    """Where the ideals of every size begin and end."""
    low = np.flatnonzero(np.diff(sizes, prepend=-1)).tolist()
    return low, [*low[1:], len(sizes)]
