"""greedy: builds many orders at once, event by event, each by its own rule.

A rank that is free runs, of the passes that have all they need and fit in memory, the one with the smallest *key*. It
may wait a little for a better one that is known to come (*patience*), and no pass starts before its *release*. Keys and
releases are what tells one order from another; everything else is the same for all, so that one round of array
operations moves all runs on. In a round, every rank decides that no message still to be sent can reach in time.

A run never gets stuck for lack of memory: a pass is admitted only if what its rank would then hold still lets every
microbatch under way get through, one after another.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.planner.synthesis.rows import Floats, Ints, Rows

_ROUNDING = 1e-12


class Rule(NamedTuple):
    """What makes a run: per run, row and microbatch a key and a release; per run the seconds that a rank may wait."""

    keys: Floats
    releases: Floats
    patience: Floats


class Runs(NamedTuple):
    """The outcome, run by run: length (inf if stuck), when each pass starts, and the how-manieth on its rank it is."""

    lengths: Floats
    starts: Floats
    turns: Ints


class _Wiring(NamedTuple):
    """Which rows a row's passes send to, and over what; the row that does not exist takes what nobody reads."""

    targets: Ints
    link: Ints
    occupied: Floats
    latency: Floats
    num_reads: Ints
    """per row how many messages its passes wait for"""


class _Escape(NamedTuple):
    """Per rank the rows that take bytes, their places among its rows, and what one takes that another must let pass."""

    takers: Ints
    places: Ints
    weights: Floats


@dataclass
class _State:
    """Where all runs are; the last row and the last microbatch are there for what does not exist."""

    counts: Ints
    clocks: Floats
    held: Floats
    missing: NDArray[np.int8]
    """messages that a pass still waits for"""
    ready: Floats
    """when a pass has all it needs, once nothing is missing"""
    free: Floats
    starts: Floats
    turns: Ints


class Greedy:
    """The tables of one problem, read by every run."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.seconds = np.append(rows.seconds, 0.0)
        self.taken = np.append(rows.taken, 0.0)
        self.local = _padded(rows.of_rank, rows.num_rows)
        self.prior = _priors(rows)[self.local]
        self.wiring = _wiring(rows)
        self.escape = _escape(rows)
        crossing = [float(rows.seconds[need.needed]) + need.lag for need in rows.needs if need.link >= 0]
        # No message that is still to be sent arrives sooner than so long after the earliest decision.
        self.ahead = min(crossing, default=inf)

    def run(self, rule: Rule) -> Runs:
        """One order per key table."""
        state = self._begin(rule.releases)
        keys = _bordered(rule.keys, inf)
        while self._step(state, keys, rule.patience):
            pass
        is_finished = (state.counts[:, :-1] == self.rows.shop.num_microbatches).all(axis=1)
        lengths = np.where(is_finished, (state.clocks + self.rows.after).max(axis=1), inf)
        return Runs(lengths, state.starts[:, :-1], state.turns[:, :-1])

    def _begin(self, releases: Floats) -> _State:
        runs, rows, columns = releases.shape
        counts = np.zeros((runs, rows + 1), dtype=np.int64)
        counts[:, rows] = columns
        missing = np.tile(self.wiring.num_reads.astype(np.int8)[:, None], (runs, 1, columns + 1))
        return _State(
            counts,
            np.tile(self.rows.before, (runs, 1)),
            np.zeros((runs, self.rows.shop.num_ranks)),
            missing,
            _bordered(releases, 0.0),
            np.zeros((runs, self.rows.shop.num_links + 1)),
            np.zeros((runs, rows + 1, columns)),
            np.zeros((runs, rows + 1, columns), dtype=np.int64),
        )

    def _step(self, state: _State, keys: Floats, patience: Floats) -> bool:
        """Every rank that can decides on its next pass; False if none can."""
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
        self._run(state, (run, rank, rows[one, chosen], turn[one, chosen]), starts[one, chosen])
        return True

    def _earliest(self, state: _State, turn: Ints) -> Floats:
        """Per run, rank and row of the rank when its next pass could start; inf if it may not, or is not known yet."""
        runs, rows, columns = state.ready.shape
        flat = (np.arange(runs) * (rows * columns))[:, None, None] + self.local * columns + turn
        ready = np.maximum(state.ready.ravel()[flat], state.clocks[:, :, None])
        may = (state.missing.ravel()[flat] == 0) & (turn < columns - 1) & (turn < state.counts[:, self.prior])
        taken = self.taken[self.local]
        may &= (taken <= 0) | (state.held[:, :, None] + taken <= np.asarray(self.rows.shop.room)[:, None])
        if self.escape.takers.shape[1] > 1:
            self._keep_escapes(state, may)
        return np.where(may, ready, inf)

    def _keep_escapes(self, state: _State, may: NDArray[np.bool_]) -> None:
        """Forbid takers after which some microbatch under way would never find room.

        The next microbatch of each taker needs, besides what is taken for later ones, one place for each that it has
        not run. One more of another taker counts only where that one is ahead already.
        """
        takers, places, weights = self.escape
        counts = state.counts[:, takers]
        ahead = counts[:, :, None, :] - counts[:, :, :, None]
        wanted = (weights * np.maximum(ahead, 1)).sum(axis=3, keepdims=True) + weights * (ahead >= 1)
        is_behind = (counts < self.rows.shop.num_microbatches)[:, :, :, None]
        is_stuck = ((wanted > np.asarray(self.rows.shop.room)[:, None, None]) & is_behind & (weights > 0)).any(axis=2)
        run, rank, nth = np.nonzero(is_stuck)
        may[run, rank, places[rank, nth]] = False

    def _run(self, state: _State, what: tuple[Ints, Ints, Ints, Ints], starts: Floats) -> None:
        run, rank, row, turn = what
        ends = starts + self.seconds[row]
        state.clocks[run, rank] = ends
        state.held[run, rank] += self.taken[row]
        state.starts[run, row, turn] = starts
        # A row that does not exist has run always; the others of the rank count what it has done.
        state.turns[run, row, turn] = state.counts[run[:, None], self.local[rank]].sum(axis=1)
        state.counts[run, row] += 1
        wiring = self.wiring
        for nth in range(wiring.targets.shape[1]):
            link, target = wiring.link[row, nth], wiring.targets[row, nth]
            sent = np.maximum(ends, state.free[run, link]) + wiring.occupied[row, nth]
            state.free[run, link] = np.where(link < self.rows.shop.num_links, sent, 0.0)
            arrival = np.maximum(state.ready[run, target, turn], sent + wiring.latency[row, nth])
            state.ready[run, target, turn] = arrival
            state.missing[run, target, turn] -= 1


def _padded(lists: tuple[tuple[int, ...], ...], filler: int) -> Ints:
    width = max(map(len, lists))
    padded = [[*each, *(filler,) * (width - len(each))] for each in lists]
    return np.array(padded, dtype=np.int64).reshape(len(lists), width)


def _bordered(table: Floats, filler: float) -> Floats:
    return np.pad(table, ((0, 0), (0, 1), (0, 1)), constant_values=filler)


def _priors(rows: Rows) -> Ints:
    """Per row the one of its stage that comes before it, or the row that does not exist and has run always."""
    priors = np.full(rows.num_rows + 1, rows.num_rows, dtype=np.int64)
    for need in rows.needs:
        if need.row // 3 == need.needed // 3:
            priors[need.row] = need.needed
    return priors


def _wiring(rows: Rows) -> _Wiring:
    messages = [need for need in rows.needs if need.row // 3 != need.needed // 3]
    sent: list[list[int]] = [[] for _ in range(rows.num_rows + 1)]
    for nth, need in enumerate(messages):
        sent[need.needed].append(nth)
    which = _padded(tuple(map(tuple, sent)), len(messages))
    none = rows.shop.num_links
    return _Wiring(
        np.array([need.row for need in messages] + [rows.num_rows], dtype=np.int64)[which],
        np.array([need.link if need.link >= 0 else none for need in messages] + [none], dtype=np.int64)[which],
        np.array([need.occupied for need in messages] + [0.0])[which],
        np.array([need.latency for need in messages] + [0.0])[which],
        np.bincount([need.row for need in messages], minlength=rows.num_rows + 1),
    )


def _escape(rows: Rows) -> _Escape:
    is_limited = bool(np.isfinite(rows.shop.room).all())
    takers = tuple(tuple(row for row in mine if rows.taken[row] > 0 and is_limited) for mine in rows.of_rank)
    table = _padded(takers, rows.num_rows)
    weights = np.zeros((*table.shape, table.shape[1]))
    places = np.zeros_like(table)
    for rank, mine in enumerate(takers):
        for nth, taker in enumerate(mine):
            places[rank, nth] = rows.of_rank[rank].index(taker)
            for other, holder in enumerate(mine):
                givers = [row for row in range(holder // 3 * 3, holder // 3 * 3 + 3) if rows.taken[row] < 0]
                if all(rows.precedes[taker, giver] for giver in givers):
                    weights[rank, nth, other] = rows.taken[holder]
    return _Escape(table, places, weights)
