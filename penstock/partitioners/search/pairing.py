"""pairing: runs for placements in which ranks hold several stages, so that the sums per rank are even."""

import math

import numpy as np

from penstock.ir import Placement
from penstock.partitioners.atoms.uses import Floats, Ints
from penstock.partitioners.atoms.windows import Box
from penstock.partitioners.search.bill import Rates
from penstock.partitioners.search.branching import Branching
from penstock.partitioners.search.minimax import nudged
from penstock.partitioners.search.probing import reaches, shortest
from penstock.partitioners.search.runs import Runs
from penstock.partitioners.search.shifts import Ledger, even_out, save_bytes
from penstock.partitioners.search.twice import Loop, Vee, is_loop, is_vee

_FEW_ATOMS = 64
_STEPS = 2000
_TRIALS = 60
_RESTARTS = 5
_MANY_STAGES = 32
"""stages above which there are no restarts at random"""
_EVEN = 0.001
_LOOP_ATOMS = 300
"""atoms up to which loops are decided exactly: that looks at all pairs of places"""


def paired(placement: Placement, runs: Runs, rates: Rates, slack: float) -> tuple[Ints, float]:
    """The stage of every atom, and a load that no cut into runs can stay below; infinite if no fitting cut is found."""
    ledger = Ledger(runs, rates, np.array(placement.ranks))
    bounds, bound = _searched(placement, ledger)
    key = ledger.key(bounds)
    bounds = save_bytes(ledger, bounds, key.busiest * (1 + slack))
    stage = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return stage, np.inf if key.excess > 0 else bound


def once(placement: Placement, runs: Runs, rates: Rates, slack: float) -> tuple[Ints, float]:
    """The same from a single start and without a bound."""
    ledger = Ledger(runs, rates, np.array(placement.ranks))
    bounds = even_out(ledger, _shares(runs, len(placement)))
    bounds = save_bytes(ledger, bounds, ledger.key(bounds).busiest * (1 + slack))
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)), 0.0


def evened(placement: Placement, runs: Runs, rates: Rates, bounds: Ints) -> Ints:
    """Given boundaries, moved until no rank can be relieved, and then to where few bytes cross."""
    ledger = Ledger(runs, rates, np.array(placement.ranks))
    bounds = even_out(ledger, bounds)
    return save_bytes(ledger, bounds, ledger.key(bounds).busiest)


def _searched(placement: Placement, ledger: Ledger) -> tuple[Ints, float]:
    starts = _starts(ledger.runs, ledger.rates)
    bounds, bound = _completed(ledger, even_out(ledger, starts[0]))
    if bound > 0:
        return bounds, bound
    for start in (*_without_weightless(placement, ledger), *starts[1:]):
        if _is_even(ledger, bounds):
            break
        bounds = min(bounds, even_out(ledger, start), key=ledger.key)
    if ledger.has_messages or ledger.has_limits:
        return bounds, 0.0
    return _decided(placement, ledger, bounds)


def _is_even(ledger: Ledger, bounds: Ints) -> bool:
    """Whether there is next to nothing to be gained."""
    loads = ledger.loads(ledger.totals(bounds))
    return ledger.key(bounds).excess == 0 and bool(loads.max() <= loads.mean() * (1 + _EVEN))


def _without_weightless(placement: Placement, ledger: Ledger) -> list[Ints]:
    """The same search with one place, the cheapest, of those between which no time is spent; nothing if none are."""
    runs, number = ledger.runs, len(ledger.runs.atoms)
    added, crossing = runs.weighing.added, runs.bytes(Box(0, number, number, number))[:, 0]
    by_weight = np.lexsort((crossing, added))
    places = np.sort(by_weight[np.diff(added[by_weight], prepend=-1) > 0])
    places = np.unique((0, *places[(places > 0) & (places < number)], number))
    if not len(placement) < len(places) < number + 1:
        return []
    group = np.repeat(np.arange(len(places) - 1), np.diff(places))
    coarse = Ledger(Runs(runs.atoms.merged(group)), ledger.rates, ledger.ranks)
    return [places[_searched(placement, coarse)[0]]]


def _completed(ledger: Ledger, bounds: Ints) -> tuple[Ints, float]:
    """What a search through all boundaries finds, if there are few enough; it is the bound then, which is 0 else."""
    key = ledger.key(bounds)
    if len(ledger.runs.atoms) > _FEW_ATOMS:
        return bounds, 0.0
    search = Branching(ledger, math.inf if key.excess > 0 else key.busiest, _STEPS)
    search.run()
    bounds = np.array(search.bounds) if search.bounds else bounds
    return bounds, ledger.key(bounds).busiest if search.is_done else 0.0


def _starts(runs: Runs, rates: Rates) -> list[Ints]:
    """Boundaries to begin with: equal shares, the evenest stages as early and late as can be, shares at random."""
    number = len(rates.slowness)
    most = nudged(shortest(runs.weighing, np.ones(number)))
    early, late = np.array(reaches(runs.weighing, np.ones(number), most)).T
    restarts = _RESTARTS if number <= _MANY_STAGES else 0
    moves = np.random.default_rng(0).uniform(-0.5, 0.5, (restarts, number + 1))
    return [_shares(runs, number), early, late, *(_shares(runs, number, move) for move in moves)]


def _shares(runs: Runs, number: int, moves: Floats | float = 0.0) -> Ints:
    """Boundaries of equal shares, moved by so many shares."""
    added = runs.weighing.added
    wishes = added[-1] * (np.arange(number + 1) + moves) / number
    return apart(np.searchsorted(added, wishes), len(runs.atoms))


def apart(bounds: Ints, number: int) -> Ints:
    """The boundaries moved as little as it takes for every run to have an atom."""
    steps = np.arange(len(bounds))
    rising = np.maximum.accumulate(bounds - steps) + steps
    rising = np.minimum(rising, number - steps[::-1])
    return np.concatenate(([0], np.maximum(rising[1:-1], steps[1:-1]), [number]))


def _decided(placement: Placement, ledger: Ledger, bounds: Ints) -> tuple[Ints, float]:
    """Better boundaries as long as there may be some, and the largest load that is refused to every cut."""
    added, number = ledger.runs.weighing.added, len(ledger.runs.atoms)
    slowness = ledger.rates.slowness[: placement.num_ranks]
    low = float(added[-1] / (1 / slowness).sum())
    if is_vee(placement):
        exact: Vee | Loop = Vee(added, slowness)
    elif is_loop(placement) and number <= _LOOP_ATOMS:
        exact = Loop(added, slowness)
    else:
        return bounds, low
    high = granted = ledger.key(bounds).busiest
    for _ in range(_TRIALS):
        if granted <= low * (1 + 1e-9):
            break
        # Close to the best, ask whether anything at all is better.
        is_last = granted - low < 1e-3 * granted
        limit = granted * (1 - 1e-9) if is_last else (low + granted) / 2
        places = exact.within(limit)
        if places is None:
            low = granted if is_last else limit
            continue
        better = even_out(ledger, apart(np.array(places), number))
        if (reached := ledger.key(better).busiest) < high:
            bounds, high, granted = better, reached, reached
        elif is_last:
            break
        else:
            granted = limit
    return bounds, low
