"""moves: single atoms handed to other stages, for a while also at a loss, and rolled back to the best that was seen.

An atom may go to any stage from the last one that it reads from to the first one that reads it, so every partition on
the way is acyclic.
"""

from dataclasses import replace

import numpy as np

from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Bools, Floats, Ints
from penstock.partitioners.search.judge import Judged
from penstock.partitioners.search.vicinity import Vicinity

_ROUNDS = 6
_MOVES = 200
"""in one pass, fewer for more atoms than _MANY / _MOVES"""
_MANY = 300_000
_PATIENCE = 25
"""moves in a row that may bring nothing"""


def improved(judged: Judged) -> Judged:
    """The best that moves lead to: ranks evened out, then bytes saved, and again while that helps."""
    vicinity = Vicinity(judged.atoms)
    for _ in range(_ROUNDS):
        better = _cheaper(_evened(judged), vicinity)
        if better.score >= judged.score:
            break
        judged = better
    return judged


def windows(atoms: Atoms, stage: Ints, num_stages: int) -> tuple[Ints, Ints]:
    """The first and the last stage that every atom may go to."""
    first, last = np.zeros(len(atoms), dtype=np.int64), np.full(len(atoms), num_stages - 1)
    np.maximum.at(first, atoms.arrows.atom, stage[atoms.arrows.thing])
    np.minimum.at(last, atoms.arrows.thing, stage[atoms.arrows.atom])
    return first, last


def _evened(best: Judged) -> Judged:
    """One pass in which every atom moves at most once, the move first that evens out the ranks most."""
    seconds, ranks, slowness = best.atoms.seconds, best.ranks, best.problem.slowness_of
    stage, is_free, patience = best.stage, np.ones(len(best.atoms), dtype=np.bool_), _PATIENCE
    loads = slowness * np.bincount(ranks, best.stage_seconds, minlength=len(slowness))
    for _ in range(min(_MOVES, max(_MANY // len(best.atoms), 20))):
        found = _evenest_move(best, stage, loads, is_free)
        if found is None or not patience:
            break
        atom, target = found
        loads = loads.copy()
        for rank, sign in ((ranks[stage[atom]], -1), (ranks[target], 1)):
            loads[rank] += sign * seconds[atom] * slowness[rank]
        stage, is_free[atom] = stage.copy(), False
        stage[atom] = target
        now = replace(best, stage=stage)
        patience = _PATIENCE if now.score < best.score else patience - 1
        best = min(best, now, key=lambda judged: judged.score)
    return best


def _evenest_move(judged: Judged, stage: Ints, loads: Floats, is_free: Bools) -> tuple[int, int] | None:
    """The atom and its new stage that lower the sum of squares most; None if nothing that takes time may move."""
    seconds, ranks, slowness = judged.atoms.seconds, judged.ranks, judged.problem.slowness_of
    first, last = windows(judged.atoms, stage, judged.num_stages)
    is_alone = np.bincount(stage, minlength=judged.num_stages)[stage] == 1
    movable = np.flatnonzero(is_free & ~is_alone & (first < last) & (seconds > 0))
    if not len(movable):
        return None
    targets = np.arange(judged.num_stages)
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


def _cheaper(judged: Judged, vicinity: Vicinity) -> Judged:
    """Atoms moved to where fewer bytes cross, as long as no rank gets busier than the busiest is."""
    seconds, slowness, ranks = judged.atoms.seconds, judged.problem.slowness_of, judged.ranks
    everyone, limit = judged.everyone.copy(), judged.score.busiest * (1 + 1e-12)
    loads = slowness * np.bincount(ranks, judged.stage_seconds, minlength=len(slowness))
    sizes = np.bincount(judged.stage, minlength=judged.num_stages)
    first, last = windows(judged.atoms, judged.stage, judged.num_stages)
    for atom in np.flatnonzero(first < last).tolist():
        own = int(everyone[atom])
        low, high = vicinity.window(atom, everyone, judged.num_stages)
        fits = [
            target
            for target in range(low, high + 1)
            if target == own
            or ranks[target] == ranks[own]
            or loads[ranks[target]] + seconds[atom] * slowness[ranks[target]] <= limit
        ]
        if sizes[own] == 1 or len(fits) < 2:
            continue
        best = min(fits, key=lambda target: (vicinity.bytes(atom, target, everyone, ranks), target != own))
        for target, sign in ((own, -1), (best, 1)):
            sizes[target] += sign
            loads[ranks[target]] += sign * seconds[atom] * slowness[ranks[target]]
        everyone[atom] = best
    now = replace(judged, stage=everyone[:-1])
    return min(judged, now, key=lambda found: found.score)
