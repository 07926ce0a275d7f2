"""Builds many orders at once by list scheduling, each by its own priority rule.

A free rank runs, of the passes that have all they need and fit in memory, the one with the smallest *key*. It may wait
a little for one with a smaller key that is about to become ready (*patience*), and no pass starts before its *release*.
Orders differ only in these numbers, so all of them advance together: a *run* is one entry along the first axis of every
array, and a round of array operations adds passes to all runs. A rank decides in a round only if no message that has
not been sent yet could arrive before its decision.

A run never deadlocks for lack of memory. As in the banker's algorithm, a pass is admitted only if the rank would then
still have room to finish every microbatch in flight, one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir import Bools, Floats, Ints
from penstock.planner.synthesis.pass_table import PassTable

PATIENCE = (0.0, 0.27, 0.2, 0.1, 0.34, 0.05, 0.5)
"""time to wait for a pass with a smaller key, as a multiple of the mean seconds of a pass"""
_EARLY = (-inf, -1.0, 0.0, -2.0, -0.5, -3.0)
"""releases relative to the latest start, in units of a microbatch's work on the busiest rank"""
_LATE = (0.1, 0.05, 0.2)
"""releases as if the step ended that much later than its bound, as shares of the bound"""
_ROUNDING = 1e-12


class Rules(NamedTuple):
    """The priority rules of all runs."""

    keys: Floats
    """by run, row and microbatch; the smallest goes first"""
    releases: Floats
    """by run, row and microbatch; no pass starts before it"""
    patience: Floats
    """by run; seconds that a rank may wait for a pass with a smaller key"""


class GreedyRuns(NamedTuple):
    """The results of all runs."""

    lengths: Floats
    """by run; inf for a run that did not finish"""
    starts: Floats
    """by run, row and microbatch"""
    positions: Ints
    """by run, row and microbatch: the position in the order of its rank"""


@dataclass
class _State:
    """The state of all runs, the first axis of every array; the last row and the last microbatch are padding."""

    counts: Ints
    """passes of each row that have run, which is also the microbatch of its next pass"""
    clocks: Floats
    """when each rank is free"""
    held: Floats
    """bytes of activations on each rank"""
    num_missing: NDArray[np.int8]
    """number of messages that a pass still waits for"""
    ready: Floats
    """when a pass has all it needs, once nothing is missing"""
    link_free: Floats
    """when each link is free"""
    starts: Floats
    positions: Ints


class Greedy:
    """Runs priority rules on one problem.

    Rows of all ranks are padded to one length with a row that never runs.
    """

    def __init__(self, table: PassTable) -> None:
        self.table = table
        columns = np.broadcast_to(table.by_microbatch, (table.num_rows, table.problem.num_microbatches))
        self.seconds = np.pad(columns, ((0, 1), (0, 0)))
        self.allocated = np.append(table.allocated, 0.0)
        self.room = np.asarray(table.problem.room)
        self.rows = _padded(table.rows_of_rank, table.num_rows)
        # Per row the row of its stage that comes before it, or the padding row, which counts as finished.
        previous = np.full(table.num_rows + 1, table.num_rows, dtype=np.int64)
        for need in table.needs:
            if need.row // 3 == need.needed // 3:
                previous[need.row] = need.needed
        self.previous = previous[self.rows]
        self._find_messages()
        self._find_safety()
        # A message that is not sent yet arrives at least this long after the earliest decision of any rank.
        crossing = [float(table.seconds[need.needed]) + need.lag for need in table.needs if need.link >= 0]
        self.lookahead = min(crossing, default=inf)

    def _find_messages(self) -> None:
        """Tabulates the messages that each pass of a row sends, by row and number of the message.

        Rows that send fewer messages than others are filled up with messages to the padding row, over the padding link.
        """
        table = self.table
        messages = [need for need in table.needs if need.row // 3 != need.needed // 3]
        sent: list[list[int]] = [[] for _ in range(table.num_rows + 1)]
        for number, need in enumerate(messages):
            sent[need.needed].append(number)
        which = _padded(tuple(map(tuple, sent)), len(messages))
        no_link = table.problem.num_links
        links = [need.link if need.link >= 0 else no_link for need in messages]
        self.message_target: Ints = np.array([*(need.row for need in messages), table.num_rows])[which]
        self.message_link: Ints = np.array([*links, no_link])[which]
        self.message_occupied: Floats = np.array([*(need.occupied for need in messages), 0.0])[which]
        self.message_latency: Floats = np.array([*(need.latency for need in messages), 0.0])[which]
        self.num_awaited = np.bincount([need.row for need in messages], minlength=table.num_rows + 1)
        """per row the number of messages that its passes wait for"""

    def _find_safety(self) -> None:
        """Tabulates the allocating rows of every rank, for the check that they can always finish."""
        table = self.table
        is_limited = bool(np.isfinite(table.problem.room).all())
        by_rank = tuple(
            tuple(row for row in rows if table.allocated[row] > 0 and is_limited) for rows in table.rows_of_rank
        )
        self.allocating = _padded(by_rank, table.num_rows)
        self.allocating_columns = np.zeros_like(self.allocating)
        """the same as positions among the rows of the rank"""
        self.blocked_bytes = np.zeros((*self.allocating.shape, self.allocating.shape[1]))
        """[rank, a, b]: bytes that row b allocates and that are freed only after a pass of row a"""
        for rank, rows in enumerate(by_rank):
            for a, row in enumerate(rows):
                self.allocating_columns[rank, a] = table.rows_of_rank[rank].index(row)
                for b, holder in enumerate(rows):
                    if all(table.precedes[row, freeing] for freeing in table.freeing_rows(holder // 3)):
                        self.blocked_bytes[rank, a, b] = table.allocated[holder]

    def run(self, rules: Rules) -> GreedyRuns:
        """Returns one order per rule."""
        runs, rows, columns = rules.releases.shape
        counts = np.zeros((runs, rows + 1), dtype=np.int64)
        counts[:, rows] = columns
        state = _State(
            counts,
            np.tile(self.table.before, (runs, 1)),
            np.zeros((runs, self.table.problem.placement.num_ranks)),
            np.tile(self.num_awaited.astype(np.int8)[:, None], (runs, 1, columns + 1)),
            _with_padding(rules.releases, 0.0),
            np.zeros((runs, self.table.problem.num_links + 1)),
            np.zeros((runs, rows + 1, columns)),
            np.zeros((runs, rows + 1, columns), dtype=np.int64),
        )
        keys = _with_padding(rules.keys, inf)
        while self._advance(state, keys, rules.patience):
            pass
        is_finished = (state.counts[:, :-1] == self.table.problem.num_microbatches).all(axis=1)
        lengths = np.where(is_finished, (state.clocks + self.table.after).max(axis=1), inf)
        return GreedyRuns(lengths, state.starts[:, :-1], state.positions[:, :-1])

    def _advance(self, state: _State, keys: Floats, patience: Floats) -> bool:
        """Adds the next pass of every rank that can decide; returns False if none can."""
        microbatch = state.counts[:, self.rows]
        earliest = self._earliest_starts(state, microbatch)
        of_rank = earliest.min(axis=2)
        of_run = of_rank.min(axis=1, keepdims=True)
        # The second condition lets a run advance if messages and passes take no time.
        can_decide = (of_rank < of_run + self.lookahead) | (of_rank == of_run)
        run, rank = np.nonzero(can_decide & (of_rank < inf))
        if not len(run):
            return False
        rows, starts, microbatch = self.rows[rank], earliest[run, rank], microbatch[run, rank]
        latest = of_rank[run, rank] + patience[run] + _ROUNDING
        eligible_keys = np.where(starts <= latest[:, None], keys[run[:, None], rows, microbatch], inf)
        chosen = np.arange(len(run)), eligible_keys.argmin(axis=1)
        self._add_passes(state, run, rank, rows[chosen], microbatch[chosen], starts[chosen])
        return True

    def _earliest_starts(self, state: _State, microbatch: Ints) -> Floats:
        """By run, rank and row of the rank when its next pass can start; inf if it may not or that is not known yet."""
        runs, rows, columns = state.ready.shape
        # Positions in the arrays laid flat.
        at = (np.arange(runs) * (rows * columns))[:, None, None] + self.rows * columns + microbatch
        ready = np.maximum(state.ready.ravel()[at], state.clocks[:, :, None])
        may_run = state.num_missing.ravel()[at] == 0
        may_run &= (microbatch < columns - 1) & (microbatch < state.counts[:, self.previous])
        allocated = self.allocated[self.rows]
        may_run &= (allocated <= 0) | (state.held[:, :, None] + allocated <= self.room[:, None])
        if self.allocating.shape[1] > 1:
            self._forbid_unsafe(state, may_run)
        return np.where(may_run, ready, inf)

    def _forbid_unsafe(self, state: _State, may_run: Bools) -> None:
        """Clears `may_run` of allocating passes after which some microbatch in flight would never find room.

        For its oldest microbatch to finish, row a needs room for what every row b has allocated for microbatches that
        row a has not run, and for one pass of b at least. One more pass of b counts only if b is ahead already.
        """
        blocked_bytes, counts = self.blocked_bytes, state.counts[:, self.allocating]
        ahead = counts[:, :, None, :] - counts[:, :, :, None]
        needed = (blocked_bytes * np.maximum(ahead, 1)).sum(axis=3, keepdims=True) + blocked_bytes * (ahead >= 1)
        is_unfinished = (counts < self.table.problem.num_microbatches)[:, :, :, None]
        is_unsafe = ((needed > self.room[:, None, None]) & is_unfinished & (blocked_bytes > 0)).any(axis=2)
        run, rank, number = np.nonzero(is_unsafe)
        may_run[run, rank, self.allocating_columns[rank, number]] = False

    def _add_passes(self, state: _State, run: Ints, rank: Ints, row: Ints, microbatch: Ints, starts: Floats) -> None:
        """Adds one pass to each of the given (run, rank) and sends its messages."""
        ends = starts + self.seconds[row, microbatch]
        state.clocks[run, rank] = ends
        state.held[run, rank] += self.allocated[row]
        state.starts[run, row, microbatch] = starts
        # The passes of the rank so far. Padding rows add a constant per rank, which does not change the order.
        state.positions[run, row, microbatch] = state.counts[run[:, None], self.rows[rank]].sum(axis=1)
        state.counts[run, row] += 1
        for number in range(self.message_target.shape[1]):
            link, target = self.message_link[row, number], self.message_target[row, number]
            sent = np.maximum(ends, state.link_free[run, link]) + self.message_occupied[row, number]
            # The padding link is always free.
            state.link_free[run, link] = np.where(link < self.table.problem.num_links, sent, 0.0)
            arrival = np.maximum(state.ready[run, target, microbatch], sent + self.message_latency[row, number])
            state.ready[run, target, microbatch] = arrival
            state.num_missing[run, target, microbatch] -= 1


def _padded(lists: tuple[tuple[int, ...], ...], filler: int) -> Ints:
    """The lists as rows of one array."""
    width = max(map(len, lists))
    padded = [[*each, *(filler,) * (width - len(each))] for each in lists]
    return np.array(padded, dtype=np.int64).reshape(len(lists), width)


def _with_padding(values: Floats, filler: float) -> Floats:
    """The values with a padding row and a padding microbatch."""
    return np.pad(values, ((0, 0), (0, 1), (0, 1)), constant_values=filler)


def portfolio(table: PassTable, starts: Floats, remaining: Floats, bound: float, size: int) -> Rules:
    """Returns at most `size` rules to start with: `steady_rule`, and all combinations of keys, releases and patience.

    `starts` are the earliest starts, `remaining` the seconds that must follow the end of each pass. The basic key of a
    pass is the latest moment at which it may start if the step is to end at its bound. A release keeps an allocating
    pass from running long before that moment; variants differ in how long.
    """
    latest_start = bound - remaining - table.by_microbatch
    pace = table.busiest_seconds
    shifts = [shift * pace for shift in _EARLY] + [late * bound - early * pace for late in _LATE for early in (1, 0)]
    steady = [] if table.is_mirrored else [steady_rule(table, starts)]
    rules = list(product(shifts, PATIENCE, _keys(table, latest_start)))[: size - len(steady)]
    allocates = (table.allocated > 0)[:, None]
    found = Rules(
        np.array([key for _, _, key in rules]).reshape(-1, *latest_start.shape),
        np.array([np.where(allocates, np.maximum(latest_start + shift, 0.0), 0.0) for shift, _, _ in rules]).reshape(
            -1, *latest_start.shape
        ),
        np.array([patience * table.seconds.mean() for _, patience, _ in rules]),
    )
    return Rules(*(np.concatenate(parts) for parts in zip(*steady, found, strict=True)))


def steady_rule(table: PassTable, starts: Floats) -> Rules:
    """Returns the rule that leads into a steady state without idle time, as a single run.

    Every rank runs input gradients first, then forwards, and weight gradients only to fill gaps. From then on it
    repeats the same few passes and always has one that can run. Before that, it has only forwards; one that started
    just before the first gradient arrives would delay the gradient, on this rank and on all before it. So forwards that
    would overlap the earliest start of the first input gradient are released at its end.
    """
    releases = np.zeros_like(starts)
    for rows in table.rows_of_rank:
        # When the first input gradient of each stage starts and ends.
        first = sorted((starts[row, 0], starts[row, 0] + table.seconds[row]) for row in rows if row % 3 == 1)
        forwards = sorted((starts[row, column], row, column) for row in rows[::3] for column in range(starts.shape[1]))
        now = 0.0
        for start, row, column in forwards:
            now = max(now, start)
            while first and now + table.seconds[row] > first[0][0] * (1 + _ROUNDING):
                now = max(now, first.pop(0)[1])
            releases[row, column] = now
            if not first:
                # Later gradients find their gaps: input gradients and forwards alternate.
                break
            now += table.seconds[row]
    return Rules(by_kind(table, starts.shape[1])[None], releases[None], np.zeros(1))


def _keys(table: PassTable, latest_start: Floats) -> Sequence[Floats]:
    """Variants of keys, by row and microbatch."""
    # Larger than any difference between two latest starts, so that it decides before them.
    far = 1e3 * max(float(np.abs(latest_start).max()), 1.0)
    part = np.arange(table.num_rows)[:, None] % 3
    # Other ranks wait for input gradients.
    input_gradients_first = latest_start + np.where(part == 1, -far, 0.0)
    if table.is_mirrored:
        return latest_start, input_gradients_first
    # Weight gradients only fill gaps, as no other rank waits for them.
    weight_gradients_last = latest_start + np.where(part == 2, far, 0.0)
    return latest_start, input_gradients_first, weight_gradients_last, by_kind(table, latest_start.shape[1])


def by_kind(table: PassTable, num_microbatches: int) -> Floats:
    """Returns keys by row and microbatch: input gradients before forwards before weight gradients.

    Forwards of later stages go before those of earlier ones, and earlier microbatches before later ones.
    """
    part, stage = np.arange(table.num_rows)[:, None] % 3, np.arange(table.num_rows)[:, None] // 3
    kinds = np.choose(part, (1.0, 0.0, 2.0)) - np.where(part == 0, stage / table.num_rows, 0.0)
    return np.asarray(10.0 * num_microbatches * table.num_rows * kinds + np.arange(num_microbatches))
