"""Finds the best partition of a model with few branches by enumerating chains of ideals.

An ideal is a set of atoms that contains, with an atom, all atoms that it reads from: a prefix of the model in some
order of its branches. A chain of n blocks has n + 1 of them; k parallel branches of length l have (l + 1) ** k. Where
they can be enumerated, the best partition is the best chain of ideals, and no partition is better.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.ir import Bools, Floats, Ints
from penstock.partitioners.atoms import Atoms, Incidence
from penstock.partitioners.costs import CandidateCosts
from penstock.partitioners.search.contiguous import Level, Levels

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
        """Prepares the sums; `inside` has a row per ideal and a column per atom."""
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
        """Returns the sums over the differences of ideals: a row per begin, a column per end."""
        alone = self.total[ends] - self.total[begins][:, None]
        return alone + self.begin[begins] @ self.end[ends].T if self.begin.shape[1] else alone


def ideal_levels(atoms: Atoms, inside: Bools, with_sent: bool = False) -> Levels:
    """Returns the levels of all ideals: every ideal as an end, with all smaller ones as starts.

    `inside` has a row per ideal and a column per atom, as `all_ideals` returns them. `with_sent` works out bytes sent,
    which count only if messages do not overlap with compute.
    """
    values, tensors, inputs, saved = atoms.values, atoms.tensors, atoms.input_only, atoms.saved
    # A column for the reader of the model's outputs, which is inside only once everything else is.
    with_reader = np.column_stack((inside, inside.all(axis=1)))
    is_inside = inside.astype(np.float64)
    seconds, kept = is_inside @ atoms.seconds, is_inside @ atoms.kept
    sums = {
        "inputs_seconds": _ItemSums.of(with_reader, inputs.uses, inputs.seconds),
        "inputs_kept": _ItemSums.of(with_reader, inputs.uses, inputs.kept),
        "parameters": _ItemSums.of(with_reader, tensors.uses, tensors.parameters),
        "state": _ItemSums.of(with_reader, tensors.uses, tensors.state),
        "saved": _ItemSums.of(with_reader, saved.uses, saved.sizes),
        "received": _ItemSums.of(with_reader, values.uses, values.forward, values.maker),
        "grads_sent": _ItemSums.of(with_reader, values.uses, values.backward, values.maker),
    }
    if with_sent:
        # Per ideal and value: 1 if it is made inside, and whether an atom outside reads it.
        made = is_inside[:, values.maker]
        readers = np.zeros((len(atoms) + 1, len(values.maker)))
        readers[values.uses.atom, values.uses.item] = 1
        made_and_open = made * ((1 - with_reader) @ readers > 0)

    def costs(begins: slice, ends: slice) -> CandidateCosts:
        """The costs of stages: a row per begin, a column per end."""
        shared = {name: each.between(begins, ends) for name, each in sums.items()}
        sent = grads_received = 0 * shared["received"]
        if with_sent:
            # Values that are made in the stage and read after it.
            sent, grads_received = (
                (1 - made[begins]) @ (made_and_open[ends] * size).T for size in (values.forward, values.backward)
            )
        return CandidateCosts(
            seconds[ends] - seconds[begins][:, None] + shared["inputs_seconds"],
            shared["received"],
            shared["grads_sent"],
            sent,
            grads_received,
            shared["parameters"],
            shared["state"],
            kept[ends]
            - kept[begins][:, None]
            + shared["inputs_kept"]
            + (shared["saved"] if saved.is_known else shared["received"]),
        )

    def levels() -> Iterator[Level]:
        sizes = inside.sum(axis=1)
        lows = np.flatnonzero(np.diff(sizes, prepend=-1)).tolist()
        for low, high in zip(lows, [*lows[1:], len(sizes)], strict=True):
            step = max(_PAIRS // max(low, 1), 1)
            for start in range(low, high, step) if low else ():
                begins, ends = slice(0, low), slice(start, min(start + step, high))
                cost = costs(begins, ends)
                is_part = is_inside[begins] @ (1 - is_inside[ends]).T == 0
                cost = cost._replace(seconds=np.where(is_part, cost.seconds, np.inf))
                yield Level(np.arange(low), np.arange(ends.start, ends.stop), cost)

    return levels
