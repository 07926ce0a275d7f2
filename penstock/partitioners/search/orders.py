"""orders: other orders in which the atoms can run, each of which has cuts that the model's own order has not."""

import heapq

import numpy as np

from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Floats, Ints


def other_orders(atoms: Atoms, number: int) -> list[Ints]:
    """Branch after branch, then at random, the same ones every time: a position per atom."""
    random = np.random.default_rng(0)
    return [_branchwise(atoms), *(ordered(atoms, random.random(len(atoms))) for _ in range(number - 1))]


def ordered(atoms: Atoms, wish: Floats) -> Ints:
    """The order in which, of all atoms that can be next, the one with the least wish is; a position per atom."""
    waiting = [len(found) for found in atoms.predecessors]
    ready = [(float(wish[atom]), atom) for atom, number in enumerate(waiting) if not number]
    heapq.heapify(ready)
    position = np.empty(len(atoms), dtype=np.int64)
    for turn in range(len(atoms)):
        _, atom = heapq.heappop(ready)
        position[atom] = turn
        for other in atoms.successors[atom].tolist():
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (float(wish[other]), other))
    return position


def _branchwise(atoms: Atoms) -> Ints:
    """The order that follows what it has just begun."""
    waiting = [len(found) for found in atoms.predecessors]
    ready = [atom for atom, number in enumerate(waiting) if not number][::-1]
    position = np.empty(len(atoms), dtype=np.int64)
    for turn in range(len(atoms)):
        atom = ready.pop()
        position[atom] = turn
        for other in atoms.successors[atom].tolist()[::-1]:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return position
