"""Builds many orders at once, event by event, each by its own rule.

A free rank runs, of the passes that have all they need and fit in memory, the one with the smallest *key*. It may wait
a little for a better one that is known to come (*patience*), and no pass starts before its *release*. Only keys and
releases differ between orders, so that one round of array operations advances all of them. A rank decides in a round if
no message that has not been sent yet could arrive before its decision.

A run never blocks for lack of memory: a pass is admitted only if the rank would then still have room to finish every
microbatch in flight, one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.planner.synthesis.pass_table import Bools, Floats, Ints, PassTable

PATIENCE = (0.0, 0.27, 0.2, 0.1, 0.34, 0.05, 0.5)
"""seconds to wait for a better pass, in parts of a pass"""
_EARLY = (-inf, -1.0, 0.0, -2.0, -0.5, -3.0)
"""releases before the urgent moment, in units of a microbatch's work on the busiest rank"""
_LATE = (0.1, 0.05, 0.2)
"""releases as if the step were to end that much later than its bound, in parts of the bound"""
_ROUNDING = 1e-12


class Rules(NamedTuple):
    """Per run, row and microbatch a key and a release; per run the seconds that a rank may wait."""

    keys: Floats
    releases: Floats
    patience: Floats


class GreedyRuns(NamedTuple):
    """Per run its length (inf if stuck), when each pass starts, and its position in the order of its rank."""

    lengths: Floats
    starts: Floats
    positions: Ints


class _Wiring(NamedTuple):
    """Rows that a row's passes send to, and links; a padding row receives messages that no row reads."""

    targets: Ints
    link: Ints
    occupied: Floats
    latency: Floats
    num_reads: Ints
    """per row the number of messages that its passes wait for"""


class _Escape(NamedTuple):
    """Per rank the rows that allocate, their places among its rows, and the bytes of each that another depends on."""

    takers: Ints
    places: Ints
    weights: Floats


@dataclass
class _State:
    """The state of all runs; the last row and the last microbatch are padding."""

    counts: Ints
    clocks: Floats
    held: Floats
    missing: NDArray[np.int8]
    """number of messages that a pass still waits for"""
    ready: Floats
    """when a pass has all it needs, once nothing is missing"""
    free: Floats
    starts: Floats
    positions: Ints


class Greedy:
    """The arrays of one problem, which every run reads."""

    def __init__(self, table: PassTable) -> None:
        self.table = table
        self.seconds = np.append(table.seconds, 0.0)
        self.taken = np.append(table.taken, 0.0)
        self.room = np.asarray(table.flat.room)
        self.local = _padded(table.of_rank, table.num_rows)
        self.prior = _priors(table)[self.local]
        self.wiring = _wiring(table)
        self.escape = _escape(table)
        crossing = [float(table.seconds[need.needed]) + need.lag for need in table.needs if need.link >= 0]
        # No message that is still to be sent arrives sooner than this after the earliest decision.
        self.ahead = min(crossing, default=inf)

    def run(self, rules: Rules) -> GreedyRuns:
        """Returns one order per rule."""
        state = self._begin(rules.releases)
        keys = _bordered(rules.keys, inf)
        while self._step(state, keys, rules.patience):
            pass
        is_finished = (state.counts[:, :-1] == self.table.flat.num_microbatches).all(axis=1)
        lengths = np.where(is_finished, (state.clocks + self.table.after).max(axis=1), inf)
        return GreedyRuns(lengths, state.starts[:, :-1], state.positions[:, :-1])

    def _begin(self, releases: Floats) -> _State:
        runs, rows, columns = releases.shape
        counts = np.zeros((runs, rows + 1), dtype=np.int64)
        counts[:, rows] = columns
        missing = np.tile(self.wiring.num_reads.astype(np.int8)[:, None], (runs, 1, columns + 1))
        return _State(
            counts,
            np.tile(self.table.before, (runs, 1)),
            np.zeros((runs, self.table.flat.num_ranks)),
            missing,
            _bordered(releases, 0.0),
            np.zeros((runs, self.table.flat.num_links + 1)),
            np.zeros((runs, rows + 1, columns)),
            np.zeros((runs, rows + 1, columns), dtype=np.int64),
        )

    def _step(self, state: _State, keys: Floats, patience: Floats) -> bool:
        """Lets every rank that can decide on its next pass; returns False if none can."""
        turn = state.counts[:, self.local]
        earliest = self._earliest(state, turn)
        soonest = earliest.min(axis=2)
        first = soonest.min(axis=1, keepdims=True)
        decides = (soonest < first + self.ahead) | (soonest == first)
        run, rank = np.nonzero(decides & (soonest < inf))
        if not len(run):
            return False
        rows, starts, turn = self.local[rank], earliest[run, rank], turn[run, rank]
        latest = soonest[run, rank] + patience[run] + _ROUNDING
        wanted = np.where(starts <= latest[:, None], keys[run[:, None], rows, turn], inf)
        one, chosen = np.arange(len(run)), wanted.argmin(axis=1)
        self._place(state, run, rank, rows[one, chosen], turn[one, chosen], starts[one, chosen])
        return True

    def _earliest(self, state: _State, turn: Ints) -> Floats:
        """Per run, rank and row of the rank when its next pass could start; inf if it may not or is not yet known."""
        runs, rows, columns = state.ready.shape
        flat = (np.arange(runs) * (rows * columns))[:, None, None] + self.local * columns + turn
        ready = np.maximum(state.ready.ravel()[flat], state.clocks[:, :, None])
        may = (state.missing.ravel()[flat] == 0) & (turn < columns - 1) & (turn < state.counts[:, self.prior])
        taken = self.taken[self.local]
        may &= (taken <= 0) | (state.held[:, :, None] + taken <= self.room[:, None])
        if self.escape.takers.shape[1] > 1:
            self._keep_escapes(state, may)
        return np.where(may, ready, inf)

    def _keep_escapes(self, state: _State, may: Bools) -> None:
        """Forbids allocating passes after which some microbatch in flight would never find room.

        The next microbatch of each allocating row needs, besides the bytes of later ones, one place for each row that
        it has not run. One more pass of another row counts only where that row is ahead already.
        """
        takers, places, weights = self.escape
        counts = state.counts[:, takers]
        ahead = counts[:, :, None, :] - counts[:, :, :, None]
        wanted = (weights * np.maximum(ahead, 1)).sum(axis=3, keepdims=True) + weights * (ahead >= 1)
        is_behind = (counts < self.table.flat.num_microbatches)[:, :, :, None]
        is_stuck = ((wanted > self.room[:, None, None]) & is_behind & (weights > 0)).any(axis=2)
        run, rank, nth = np.nonzero(is_stuck)
        may[run, rank, places[rank, nth]] = False

    def _place(self, state: _State, run: Ints, rank: Ints, row: Ints, turn: Ints, starts: Floats) -> None:
        """Adds one pass to each of the given runs and sends its messages."""
        ends = starts + self.seconds[row]
        state.clocks[run, rank] = ends
        state.held[run, rank] += self.taken[row]
        state.starts[run, row, turn] = starts
        # The padding row counts the same for all passes of a rank; the others count its passes so far.
        state.positions[run, row, turn] = state.counts[run[:, None], self.local[rank]].sum(axis=1)
        state.counts[run, row] += 1
        wiring = self.wiring
        for nth in range(wiring.targets.shape[1]):
            link, target = wiring.link[row, nth], wiring.targets[row, nth]
            sent = np.maximum(ends, state.free[run, link]) + wiring.occupied[row, nth]
            state.free[run, link] = np.where(link < self.table.flat.num_links, sent, 0.0)
            arrival = np.maximum(state.ready[run, target, turn], sent + wiring.latency[row, nth])
            state.ready[run, target, turn] = arrival
            state.missing[run, target, turn] -= 1


def _padded(lists: tuple[tuple[int, ...], ...], filler: int) -> Ints:
    width = max(map(len, lists))
    padded = [[*each, *(filler,) * (width - len(each))] for each in lists]
    return np.array(padded, dtype=np.int64).reshape(len(lists), width)


def _bordered(values: Floats, filler: float) -> Floats:
    return np.pad(values, ((0, 0), (0, 1), (0, 1)), constant_values=filler)


def _priors(table: PassTable) -> Ints:
    """Per row the row of its stage that comes before it, or the padding row, which has always run."""
    priors = np.full(table.num_rows + 1, table.num_rows, dtype=np.int64)
    for need in table.needs:
        if need.row // 3 == need.needed // 3:
            priors[need.row] = need.needed
    return priors


def _wiring(table: PassTable) -> _Wiring:
    messages = [need for need in table.needs if need.row // 3 != need.needed // 3]
    sent: list[list[int]] = [[] for _ in range(table.num_rows + 1)]
    for nth, need in enumerate(messages):
        sent[need.needed].append(nth)
    which = _padded(tuple(map(tuple, sent)), len(messages))
    none = table.flat.num_links
    return _Wiring(
        np.array([need.row for need in messages] + [table.num_rows], dtype=np.int64)[which],
        np.array([need.link if need.link >= 0 else none for need in messages] + [none], dtype=np.int64)[which],
        np.array([need.occupied for need in messages] + [0.0])[which],
        np.array([need.latency for need in messages] + [0.0])[which],
        np.bincount([need.row for need in messages], minlength=table.num_rows + 1),
    )


def _escape(table: PassTable) -> _Escape:
    is_limited = bool(np.isfinite(table.flat.room).all())
    takers = tuple(tuple(row for row in mine if table.taken[row] > 0 and is_limited) for mine in table.of_rank)
    padded = _padded(takers, table.num_rows)
    weights = np.zeros((*padded.shape, padded.shape[1]))
    places = np.zeros_like(padded)
    for rank, mine in enumerate(takers):
        for nth, taker in enumerate(mine):
            places[rank, nth] = table.of_rank[rank].index(taker)
            for other, holder in enumerate(mine):
                givers = [row for row in range(holder // 3 * 3, holder // 3 * 3 + 3) if table.taken[row] < 0]
                if all(table.precedes[taker, giver] for giver in givers):
                    weights[rank, nth, other] = table.taken[holder]
    return _Escape(padded, places, weights)


def portfolio(table: PassTable, tails: Floats, bound: float, size: int) -> Rules:
    """Returns at most `size` rules to start with; `tails` are the seconds that must follow the end of each pass.

    A key is the latest moment at which a pass may start if the step is to end at its bound: most urgent first. One
    variant puts input gradients first, for which others wait; one puts weight gradients last, so that they fill gaps
    only; another goes by kind: gradients before forwards before weight gradients, later stages before earlier ones. A
    release keeps an allocating pass from running long before it is urgent; variants differ in how long.
    """
    urgent = bound - tails - table.seconds[:, None]
    pace = table.busiest_seconds
    shifts = [shift * pace for shift in _EARLY] + [late * bound - early * pace for late in _LATE for early in (1, 0)]
    rules = list(product(shifts, PATIENCE, _keys(table, urgent)))[:size]
    takes = (table.taken > 0)[:, None]
    return Rules(
        np.array([key for _, _, key in rules]),
        np.array([np.where(takes, np.maximum(urgent + shift, 0.0), 0.0) for shift, _, _ in rules]),
        np.array([patience * table.seconds.mean() for _, patience, _ in rules]),
    )


def _keys(table: PassTable, urgent: Floats) -> Sequence[Floats]:
    far = 1e3 * max(float(np.abs(urgent).max()), 1.0)
    part = np.arange(table.num_rows)[:, None] % 3
    gradients_first = urgent + np.where(part == 1, -far, 0.0)
    if table.is_mirrored:
        return urgent, gradients_first
    stage = np.arange(table.num_rows)[:, None] // 3
    by_kind = far * np.choose(part, (1.0, 0.0, 2.0)) - np.where(part == 0, stage * far / table.num_rows, 0.0)
    return urgent, gradients_first, urgent + np.where(part == 2, far, 0.0), by_kind + np.arange(urgent.shape[1])
