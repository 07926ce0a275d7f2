"""shifts: boundaries between runs, moved one or several at a time as long as the busiest rank gets less to do.

Moving all boundaries from one to another by about the same weight takes from one stage and gives to a stage far away,
while those in between stay as heavy as they are. So ranks that hold several stages each can be evened out.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.partitioners.atoms.uses import Floats, Ints
from penstock.partitioners.atoms.windows import Box
from penstock.partitioners.search.bill import Bill, Rates
from penstock.partitioners.search.runs import Runs


class Key(NamedTuple):
    """What is to be small, the first most of all: bytes over the limits, the busiest rank, how uneven the ranks are."""

    excess: float
    busiest: float
    unevenness: float


@dataclass(frozen=True)
class Ledger:
    """All runs of not too many atoms with their bills, for the stages of a placement."""

    runs: Runs
    rates: Rates
    ranks: Ints
    """per stage"""

    @cached_property
    def bill(self) -> Bill:
        """Row: where a run begins; column: where it ends."""
        number = len(self.runs.atoms)
        return self.runs.bill(Box(0, number, 0, number), with_sent=not self.rates.overlaps)

    @cached_property
    def holds(self) -> Floats:
        """1 where a stage (row) is on a rank (column)."""
        return np.eye(int(self.ranks.max()) + 1)[self.ranks]

    @cached_property
    def limit(self) -> Floats:
        """Bytes of memory per rank."""
        limit = np.full(self.holds.shape[1], np.inf)
        limit[self.ranks] = self.rates.limit
        return limit

    @cached_property
    def has_messages(self) -> bool:
        """Whether bytes take time."""
        return self.rates.has_messages

    @cached_property
    def has_limits(self) -> bool:
        """Whether memory is limited."""
        return self.rates.has_limits

    @cached_property
    def has_pairs(self) -> bool:
        """Whether runs cost more than the sum of their atoms, so that all of them are worked out beforehand."""
        return self.has_messages or self.has_limits or len(self.runs.weighing.shared) > 0

    @cached_property
    def chains(self) -> tuple[Ints, Ints]:
        """The first and the last stage of all choices of consecutive boundaries."""
        low, high = np.triu_indices(len(self.ranks) - 1)
        return low, high + 1

    def charges(self, starts: Ints, ends: Ints, stages: Ints) -> Floats:
        """Of every run on its stage, row by row: seconds of work and, if they count, of messages; bytes, if limited."""
        rates = self.rates
        if not self.has_pairs:
            added = self.runs.weighing.added
            return (rates.slowness[stages] * (added[ends] - added[starts]))[None]
        bill = self.bill
        rows = [rates.slowness[stages] * bill.seconds[starts, ends]]
        if self.has_messages:
            sizes = (bill.received, bill.returned, bill.sent, bill.regained)[: 2 if rates.overlaps else 4]
            for way, size in enumerate(sizes):
                size = size[starts, ends]
                rows.append(rates.pace[stages, way] * size + rates.latency[stages, way] * (size > 0))
            rows = rows if rates.overlaps else [np.sum(rows, axis=0)]
        if self.has_limits:
            rows.append(bill.state[starts, ends] + rates.in_flight[stages] * bill.kept[starts, ends])
        return np.stack(rows)

    def totals(self, bounds: Ints) -> Floats:
        """The charges of every rank."""
        return self.charges(bounds[:-1], bounds[1:], np.arange(len(self.ranks))) @ self.holds

    def loads(self, totals: Floats) -> Floats:
        """How busy every rank is; ranks are along the last axis, charges along the one before."""
        busy: Floats = totals[..., : -1 if self.has_limits else None, :].max(axis=-2)
        return busy

    def excess(self, totals: Floats) -> Floats:
        """Bytes by which every rank exceeds its limit."""
        if not self.has_limits:
            return np.zeros((*totals.shape[:-2], totals.shape[-1]))
        return np.maximum(totals[..., -1, :] - self.limit, 0)

    def keys(self, totals: Floats) -> tuple[Floats, Floats, Floats]:
        """Excess, busiest and unevenness of totals."""
        loads = self.loads(totals)
        return self.excess(totals).sum(axis=-1), loads.max(axis=-1), (loads**2).sum(axis=-1)

    def key(self, bounds: Ints) -> Key:
        """How good boundaries are."""
        return Key(*(float(figure) for figure in self.keys(self.totals(bounds))))


def even_out(ledger: Ledger, bounds: Ints) -> Ints:
    """The boundaries after the best shift, again and again until none helps."""
    key = ledger.key(bounds)
    while True:
        shifted = [found for moved in _moves(ledger, bounds) if (found := _best_chain(ledger, bounds, moved))]
        if not shifted:
            return bounds
        best, better = min(shifted, key=lambda found: found[0])
        if not _is_better(best, key):
            return bounds
        key, bounds = best, better


def _is_better(new: Key, old: Key) -> bool:
    for now, before in zip(new, old, strict=True):
        if abs(now - before) > 1e-12 * abs(before):
            return now < before
    return False


def _moves(ledger: Ledger, bounds: Ints) -> list[Ints]:
    """All boundaries moved one way: by one atom, or by seconds from what the busiest rank has too much down."""
    number = len(ledger.runs.atoms)
    added = ledger.runs.weighing.added
    loads = ledger.loads(ledger.totals(bounds))
    surplus = float(loads.max() - loads.mean()) / float(ledger.rates.slowness.max())
    moves = [bounds + 1, bounds - 1]
    for amount in surplus * 0.5 ** np.arange(6):
        moves.append(np.searchsorted(added, added[bounds] + amount))
        moves.append(np.searchsorted(added, added[bounds] - amount, side="right") - 1)
    for moved in moves:
        moved[0], moved[-1] = 0, number
    return list(np.unique(np.clip(moves, 0, number), axis=0))


def _best_chain(ledger: Ledger, bounds: Ints, moved: Ints) -> tuple[Key, Ints] | None:
    """The best choice of consecutive boundaries to move, among those that change the busiest rank."""
    stages = np.arange(len(ledger.ranks))
    start, end, new_start, new_end = bounds[:-1], bounds[1:], moved[:-1], moved[1:]
    now = ledger.charges(start, end, stages)
    total = now @ ledger.holds
    low, high = ledger.chains
    is_real = np.concatenate(([0], np.cumsum(new_start >= new_end)))
    focus = _focus(ledger, total)
    chosen = (start < new_end)[low] & (new_start < end)[high] & (is_real[high] == is_real[low + 1])
    chosen &= (ledger.ranks[low] == focus) | (ledger.ranks[high] == focus)
    if not chosen.any():
        return None
    low, high = low[chosen], high[chosen]
    # Stage `low` ends elsewhere, stage `high` begins elsewhere, those between do both.
    first, last, between = (
        (ledger.charges(begin, stop, stages) - now)[:, :, None] * ledger.holds
        for begin, stop in ((start, new_end), (new_start, end), (new_start, new_end))
    )
    summed = np.concatenate((np.zeros_like(between[:, :1]), between.cumsum(axis=1)), axis=1)
    totals = total[:, None] + first[:, low] + last[:, high] + summed[:, high] - summed[:, low + 1]
    excess, busiest, unevenness = ledger.keys(np.moveaxis(totals, 0, 1))
    best = int(np.lexsort((unevenness, busiest, excess))[0])
    result = bounds.copy()
    result[low[best] + 1 : high[best] + 1] = moved[low[best] + 1 : high[best] + 1]
    return Key(float(excess[best]), float(busiest[best]), float(unevenness[best])), result


def _focus(ledger: Ledger, total: Floats) -> int:
    """The rank that exceeds its memory most or, if none does, the busiest."""
    excess = ledger.excess(total)
    return int(excess.argmax() if excess.any() else ledger.loads(total).argmax())


def save_bytes(ledger: Ledger, bounds: Ints, limit: float) -> Ints:
    """Boundaries moved, one at a time, to where fewer bytes cross, as long as every rank keeps the limit."""
    for _ in range(8):
        before = bounds
        for at in range(1, len(bounds) - 1):
            bounds = _cheaper(ledger, bounds, at, max(limit, ledger.key(bounds).busiest))
        if (before == bounds).all():
            break
    return bounds


def _cheaper(ledger: Ledger, bounds: Ints, at: int, limit: float) -> Ints:
    left, right = int(bounds[at - 1]), int(bounds[at + 1])
    places = np.arange(left + 1, right)
    rest = ledger.totals(bounds) - sum(
        np.outer(ledger.charges(bounds[[s]], bounds[[s + 1]], np.array([s]))[:, 0], ledger.holds[s])
        for s in (at - 1, at)
    )
    ahead = ledger.charges(np.full_like(places, left), places, np.full_like(places, at - 1))
    behind = ledger.charges(places, np.full_like(places, right), np.full_like(places, at))
    totals = rest[:, None] + ahead[:, :, None] * ledger.holds[at - 1] + behind[:, :, None] * ledger.holds[at]
    excess, busiest, _ = ledger.keys(np.moveaxis(totals, 0, 1))
    allowed = (busiest <= limit * (1 + 1e-12)) & (excess <= ledger.key(bounds).excess)
    cost = ledger.runs.bytes(Box(left, left, left + 1, right - 1))[0]
    cost = cost + ledger.runs.bytes(Box(left + 1, right - 1, right, right))[:, 0]
    crossing = np.where(allowed, cost, np.inf)
    best = int(crossing.argmin())
    if crossing[best] >= cost[bounds[at] - left - 1]:
        return bounds
    return np.concatenate((bounds[:at], [places[best]], bounds[at + 1 :]))
