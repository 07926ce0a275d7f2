"""Improves a partition by local search: single atoms move to other stages, for some moves also if that is worse.

The best partition seen is returned. An atom may go to any stage from the last one that it reads from to the first one
that reads it, so every partition in between is acyclic.
"""

from dataclasses import replace

import numpy as np

from penstock.ir import Bools, Floats, Ints
from penstock.partitioners.atoms import Atoms, grouped
from penstock.partitioners.score import Score

_ROUNDS = 6
_MOVES = 200
"""in one round; for many atoms fewer, so that moves times atoms stay below _MOVES_TIMES_ATOMS"""
_MOVES_TIMES_ATOMS = 300_000
_PATIENCE = 25
"""moves in a row without an improvement after which a round ends"""


def improve(score: Score) -> Score:
    """Returns the best partition found by moves that balance the ranks and then save bytes, repeated while it helps."""
    delta = MoveDelta(score.atoms)
    for _ in range(_ROUNDS):
        better = _save_bytes(_balance(score), delta)
        if better.key >= score.key:
            break
        score = better
    return score


def allowed_stages(atoms: Atoms, stage: Ints, num_stages: int) -> tuple[Ints, Ints]:
    """Returns the first and the last stage that every atom may go to."""
    first, last = np.zeros(len(atoms), dtype=np.int64), np.full(len(atoms), num_stages - 1)
    np.maximum.at(first, atoms.edges.atom, stage[atoms.edges.item])
    np.minimum.at(last, atoms.edges.item, stage[atoms.edges.atom])
    return first, last


def _balance(best: Score) -> Score:
    """One round in which every atom moves at most once; each time the move that balances the ranks most."""
    seconds, ranks, slowness = best.atoms.seconds, best.ranks, best.problem.slowness_of
    stage, is_free, patience = best.stage, np.ones(len(best.atoms), dtype=np.bool_), _PATIENCE
    loads = best.compute_loads
    for _ in range(min(_MOVES, max(_MOVES_TIMES_ATOMS // len(best.atoms), 20))):
        found = _best_balancing_move(best, stage, loads, is_free)
        if found is None or not patience:
            break
        atom, target = found
        loads = loads.copy()
        for rank, sign in ((ranks[stage[atom]], -1), (ranks[target], 1)):
            loads[rank] += sign * seconds[atom] * slowness[rank]
        stage, is_free[atom] = stage.copy(), False
        stage[atom] = target
        now = replace(best, stage=stage)
        patience = _PATIENCE if now < best else patience - 1
        best = min(best, now)
    return best


def _best_balancing_move(score: Score, stage: Ints, loads: Floats, is_free: Bools) -> tuple[int, int] | None:
    """The atom and the stage that lower the sum of squared loads most; None if nothing that takes time may move."""
    seconds, ranks, slowness = score.atoms.seconds, score.ranks, score.problem.slowness_of
    first, last = allowed_stages(score.atoms, stage, score.num_stages)
    is_alone = np.bincount(stage, minlength=score.num_stages)[stage] == 1
    movable = np.flatnonzero(is_free & ~is_alone & (first < last) & (seconds > 0))
    if not len(movable):
        return None
    targets = np.arange(score.num_stages)
    allowed = (first[movable, None] <= targets) & (targets <= last[movable, None])
    own, other = ranks[stage[movable]], ranks
    allowed &= own[:, None] != other
    lost, won = seconds[movable] * slowness[own], seconds[movable, None] * slowness[other]
    change = won * (won + 2 * loads[other]) + (lost * (lost - 2 * loads[own]))[:, None]
    change = np.where(allowed, change, np.inf)
    at = int(change.argmin())
    if np.isinf(change.flat[at]):
        return None
    return int(movable[at // len(targets)]), at % len(targets)


def _save_bytes(score: Score, delta: "MoveDelta") -> Score:
    """Atoms moved to where fewer bytes cross, as long as no rank exceeds the load of the busiest one."""
    seconds, slowness, ranks = score.atoms.seconds, score.problem.slowness_of, score.ranks
    stage_of, limit = score.stage_of.copy(), score.key.busiest * (1 + 1e-12)
    loads = score.compute_loads.copy()
    sizes = np.bincount(score.stage, minlength=score.num_stages)
    first, last = allowed_stages(score.atoms, score.stage, score.num_stages)
    for atom in np.flatnonzero(first < last).tolist():
        own = int(stage_of[atom])
        low, high = delta.allowed_stages(atom, stage_of, score.num_stages)
        fits = [
            target
            for target in range(low, high + 1)
            if target == own
            or ranks[target] == ranks[own]
            or loads[ranks[target]] + seconds[atom] * slowness[ranks[target]] <= limit
        ]
        if sizes[own] == 1 or len(fits) < 2:
            continue
        best = min(fits, key=lambda target: (delta.bytes(atom, target, stage_of, ranks), target != own))
        for target, sign in ((own, -1), (best, 1)):
            sizes[target] += sign
            loads[ranks[target]] += sign * seconds[atom] * slowness[ranks[target]]
        stage_of[atom] = best
    return min(score, replace(score, stage=stage_of[:-1]))


class MoveDelta:
    """The bytes that moving one atom changes, computed from the values and tensors of that atom alone."""

    def __init__(self, atoms: Atoms) -> None:
        self.atoms = atoms
        values, tensors = atoms.values, atoms.tensors
        self._readers = grouped(values.uses.item, values.uses.atom, len(values.maker))
        self._users = grouped(tensors.uses.item, tensors.uses.atom, len(tensors.state))
        # Per atom the values that it makes or reads, and the parameters and buffers that it uses.
        self._values: list[list[int]] = [[] for _ in range(len(atoms) + 1)]
        self._tensors: list[list[int]] = [[] for _ in range(len(atoms) + 1)]
        for value, maker in enumerate(values.maker.tolist()):
            self._values[maker].append(value)
        for value, atom in zip(values.uses.item.tolist(), values.uses.atom.tolist(), strict=True):
            if atom != values.maker[value]:
                self._values[atom].append(value)
        for tensor, atom in zip(tensors.uses.item.tolist(), tensors.uses.atom.tolist(), strict=True):
            self._tensors[atom].append(tensor)

    def allowed_stages(self, atom: int, stage_of: Ints, num_stages: int) -> tuple[int, int]:
        """Returns the first and the last stage that the atom may go to."""
        before, after = self.atoms.predecessors[atom], self.atoms.successors[atom]
        first = int(stage_of[before].max()) if len(before) else 0
        last = int(stage_of[after].min()) if len(after) else num_stages - 1
        return first, last

    def bytes(self, atom: int, target: int, stage_of: Ints, ranks: Ints) -> float:
        """Returns the bytes that the values and parameters of the atom cost if it is in the target stage."""
        own = stage_of[atom]
        stage_of[atom] = target
        total = 0.0
        values, tensors = self.atoms.values, self.atoms.tensors
        for value in self._values[atom]:
            readers = set(stage_of[self._readers[value]].tolist())
            owner = ranks[stage_of[values.maker[value]]]
            total += (values.forward[value] + values.backward[value]) * sum(ranks[stage] != owner for stage in readers)
        for tensor in self._tensors[atom]:
            holders = set(ranks[stage_of[self._users[tensor]]].tolist())
            total += tensors.parameters[tensor] * (len(holders) - 1)
        stage_of[atom] = own
        return total
