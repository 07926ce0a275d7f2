"""branching: boundaries tried one stage after the other, giving up where no better cut can follow.

Within its budget it is exact, for every placement, with messages and limits.
"""

import numpy as np

from penstock.partitioners.atoms.uses import Floats
from penstock.partitioners.search.shifts import Ledger


class Branching:
    """A search over all boundaries for a busiest rank with less to do than `best`."""

    def __init__(self, ledger: Ledger, best: float, budget: int) -> None:
        self.ledger = ledger
        self.best = best * (1 - 1e-9)
        self.budget = budget
        """steps that are left"""
        self.bounds: list[int] = []
        """the best that was found; empty: nothing better than what was given"""
        self.seen: set[tuple[int, int, bytes]] = set()

    @property
    def is_done(self) -> bool:
        """Whether everything was tried."""
        return self.budget > 0

    def run(self) -> None:
        """Try everything, or as much as the budget allows."""
        self._extend([0], 0 * self.ledger.totals(np.arange(len(self.ledger.ranks) + 1)))

    def _extend(self, bounds: list[int], totals: Floats) -> None:
        stage, start = len(bounds) - 1, bounds[-1]
        last = len(self.ledger.runs.atoms) - (len(self.ledger.ranks) - 1 - stage)
        state = (stage, start, np.round(totals, 9).tobytes())
        if self.budget <= 0 or state in self.seen or not self._may_fit(stage, start, totals):
            return
        self.seen.add(state)
        ends = np.arange(start + 1, last + 1) if stage < len(self.ledger.ranks) - 1 else np.array([last])
        charges = self.ledger.charges(np.full_like(ends, start), ends, np.full_like(ends, stage))
        rank = self.ledger.ranks[stage]
        with_run = totals[:, rank, None] + charges
        fits = self.ledger.loads(with_run) < self.best
        if self.ledger.has_limits:
            fits &= with_run[-1] <= self.ledger.limit[rank]
        self.budget -= 1 + int(fits.sum())
        for at in np.flatnonzero(fits)[::-1].tolist():
            after = totals.copy()
            after[:, rank] = with_run[:, at]
            if (self.ledger.loads(after) >= self.best).any():
                continue
            if len(bounds) == len(self.ledger.ranks):
                self.best, self.bounds = float(self.ledger.loads(after).max()) * (1 - 1e-9), [*bounds, int(ends[at])]
            else:
                self._extend([*bounds, int(ends[at])], after)

    def _may_fit(self, stage: int, start: int, totals: Floats) -> bool:
        """Whether the ranks that are still to come could take what is left, if it could be divided at will."""
        added = self.ledger.runs.weighing.added
        ranks, first = np.unique(self.ledger.ranks[stage:], return_index=True)
        room = (self.best - totals[0, ranks]) / self.ledger.rates.slowness[stage:][first]
        return bool(added[-1] - added[start] <= room.sum() * (1 + 1e-9))
