"""contraction: neighbouring atoms joined so that no circle can come up.

An atom that is read by one other only may be joined with that one, and an atom that reads one other only with that:
there is no second way between the two that could close a circle.
"""

import heapq
from collections.abc import Callable

import numpy as np

from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Bools, Floats, Ints, sums


def without_weightless(atoms: Atoms, at_least: int) -> Ints:
    """A group per atom: atoms that take no time go with their only reader or the only one they read.

    In seconds no partition is lost that way, unless fewer than `at_least` groups would be left; then none is made.
    """

    def is_weightless(current: Atoms, source: Ints, target: Ints) -> Bools:
        is_idle = _own_seconds(current) == 0
        first, second = is_idle[source], is_idle[target]
        joined: Bools = (first & _is_read_once(current)[source]) | (second & _reads_once(current)[target])
        return joined

    group = np.arange(len(atoms))
    while True:
        current = atoms.merged(group)
        found = matched(current, is_weightless)
        if int(found.max()) + 1 == len(current):
            return group
        if int(found.max()) + 1 < at_least:
            return np.arange(len(atoms))
        group = found[group]


def _own_seconds(atoms: Atoms) -> Floats:
    """What each atom takes when it is alone in a stage: what it needs of the inputs is computed there too."""
    uses, seconds = atoms.free.uses, atoms.free.seconds
    # One more than the atoms reads what the model returns.
    needed = np.bincount(uses.atom, weights=seconds[uses.thing], minlength=len(atoms) + 1)
    result: Floats = atoms.seconds + needed[: len(atoms)]
    return result


def halved(atoms: Atoms, heaviest: float) -> Ints:
    """A group per atom, at most two in each and together not above the heaviest, those first that exchange most."""

    def fits(current: Atoms, source: Ints, target: Ints) -> Bools:
        is_safe = _is_read_once(current)[source] | _reads_once(current)[target]
        return is_safe & (current.seconds[source] + current.seconds[target] <= heaviest)

    return matched(atoms, fits)


def matched(atoms: Atoms, allowed: Callable[[Atoms, Ints, Ints], Bools]) -> Ints:
    """Groups of one or two atoms, numbered in an order in which they can run; heavy edges are joined first."""
    arrows = atoms.arrows
    chosen = np.flatnonzero(allowed(atoms, arrows.thing, arrows.atom))
    source, target = arrows.thing[chosen], arrows.atom[chosen]
    by_bytes = np.argsort(-edge_bytes(atoms)[chosen], kind="stable")
    partner = np.arange(len(atoms))
    for before, after in zip(source[by_bytes].tolist(), target[by_bytes].tolist(), strict=True):
        if partner[before] == before and partner[after] == after:
            partner[before], partner[after] = after, before
    return in_order(atoms, np.minimum(partner, np.arange(len(atoms))))


def in_order(atoms: Atoms, label: Ints) -> Ints:
    """Labels of groups as numbers in an order in which the groups can run, the earliest atoms first."""
    _, group = np.unique(label, return_inverse=True)
    number = int(group.max()) + 1
    arrows = atoms.arrows
    source, target = group[arrows.thing], group[arrows.atom]
    edges = np.unique(np.stack((source, target))[:, source != target], axis=1)
    waiting = np.bincount(edges[1], minlength=number)
    followers = np.split(edges[1], np.searchsorted(edges[0], np.arange(1, number)))
    ready = np.flatnonzero(waiting == 0).tolist()
    position = np.full(number, -1)
    for turn in range(number):
        current = heapq.heappop(ready)
        position[current] = turn
        for other in followers[current].tolist():
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, other)
    return position[group]


def _is_read_once(atoms: Atoms) -> Bools:
    once: Bools = np.bincount(atoms.arrows.thing, minlength=len(atoms)) == 1
    return once


def _reads_once(atoms: Atoms) -> Bools:
    once: Bools = np.bincount(atoms.arrows.atom, minlength=len(atoms)) == 1
    return once


def edge_bytes(atoms: Atoms) -> Floats:
    """Bytes that go along each arrow."""
    values, arrows = atoms.values, atoms.arrows
    maker = values.maker[values.uses.thing]
    chosen = (maker != values.uses.atom) & (values.uses.atom < len(atoms))
    code = maker[chosen] * len(atoms) + values.uses.atom[chosen]
    size = (values.forward + values.backward)[values.uses.thing[chosen]]
    at = np.searchsorted(arrows.thing * len(atoms) + arrows.atom, code)
    return sums(at, size, len(arrows.thing))
