"""Limits of the load of the busiest rank: whether a cut into runs keeps one, and the least that any cut keeps.

One run per rank (`least_load`): a trial fills stage after stage up to a limit. If it fails, every stage would take the
same atoms for all limits below the least weight that one more atom would give one of them: that weight is the next
limit worth a trial. If it succeeds, the heaviest stage is the new best. Trials bisect between the two until they meet,
after a few dozen.

Two runs per rank (`limit_test`), for loops and vees: in a vee rank r takes the r-th run from the left and the r-th from
the right, so after each rank it is enough to know, for every left end, the best right end. In a loop it takes the r-th
run of the first half and the r-th of the second: the same, for every place where the second half may begin. Runs may be
empty here, and items that runs share cost nothing. So a limit that is refused cannot be kept by any cut, and one that
is granted comes with places to start from.
"""

import math
from collections.abc import Callable

import numpy as np

from penstock.ir import Bools, Floats, Ints, Placement
from penstock.partitioners.costs import RunWeights

_NOWHERE = 1 << 60
_LOOP_ATOMS = 300
"""atoms up to which loops are tested: that considers all pairs of places"""

LimitTest = Callable[[float], list[int] | None]
"""returns boundaries of runs that keep the limit, or None if there are none"""


def least_load(weights: RunWeights, slowness: Floats) -> float:
    """Returns the least load of the busiest stage, with at least one atom in each."""
    low, high, limit, step = 0.0, math.inf, 0.0, 0.01
    while True:
        is_kept, load = _fill_stages(weights, slowness.tolist(), limit)
        if is_kept:
            high = load
        else:
            low = max(load, math.nextafter(limit, math.inf))
        if low >= high:
            return high
        if math.isinf(high):
            limit, step = low * (1 + step), step * 2
        else:
            limit = (low + high) / 2 if high - low > 1e-9 * high else low


def _fill_stages(weights: RunWeights, slowness: list[float], limit: float) -> tuple[bool, float]:
    """Fills stage after stage up to the limit.

    Returns whether all atoms fit, and the load of the busiest stage if they do, else the next limit worth a trial.
    """
    start, busiest, following, number = 0, 0.0, math.inf, len(weights.prefix) - 1
    for stage, factor in enumerate(slowness):
        # Every later stage needs an atom.
        last = number - (len(slowness) - 1 - stage)
        end = min(weights.last_end(start, limit / factor), last)
        is_short = end < number if last == number else end <= start
        if is_short:
            needed = last if last == number else start + 1
            return False, min(following, weights.of_run(start, needed) * factor)
        if end < last:
            following = min(following, weights.of_run(start, end + 1) * factor)
        busiest = max(busiest, weights.of_run(start, end) * factor)
        start = end
    return True, busiest


def boundary_ranges(weights: RunWeights, slowness: Floats, limit: float) -> list[tuple[int, int]]:
    """Returns for every boundary the first and the last place where the limit can be kept, both ends included."""
    number, factors = len(weights.prefix) - 1, slowness.tolist()
    first, last = [number], [0]
    for stage, factor in enumerate(factors):
        last.append(min(weights.last_end(last[-1], limit / factor), number - (len(factors) - 1 - stage)))
    for stage, factor in reversed(list(enumerate(factors))):
        first.append(max(weights.first_start(first[-1], limit / factor), stage))
    return list(zip(reversed(first), last, strict=True))


def round_up(limit: float) -> float:
    """Returns the limit plus rounding, so that equal sums in another order keep it."""
    return limit * (1 + 1e-12)


def limit_test(placement: Placement, prefix: Floats, slowness: Floats) -> LimitTest | None:
    """Returns the test for a placement, or None if there is none for it.

    `prefix` has the weight before each place, `slowness` that of the ranks in the order of their first stages.
    """
    ranks, number = placement.ranks, placement.num_ranks
    if len(ranks) != 2 * number or len(set(ranks[:number])) != number:
        return None
    if ranks == ranks[::-1]:
        return lambda limit: _fit_vee(prefix, slowness, limit)
    if ranks[:number] == ranks[number:] and len(prefix) - 1 <= _LOOP_ATOMS:
        return lambda limit: _fit_loop(prefix, slowness, limit)
    return None


def _fit_vee(prefix: Floats, slowness: Floats, limit: float) -> list[int] | None:
    """Boundaries of runs on a vee that keep the limit.

    From outside in: after some ranks, `right[left]` is the leftmost right end for a left end, and `gap` the weight
    between the two, inf if the left end cannot be reached. The limit is kept if the two meet after the last rank.
    """
    places = np.arange(len(prefix))
    right, gap = np.full_like(places, places[-1]), np.where(places == 0, prefix[-1], np.inf)
    steps: list[tuple[float, Ints]] = []
    for factor in slowness:
        cap = round_up(limit / factor)
        steps.append((cap, np.where(np.isfinite(gap), right, _NOWHERE)))
        # The left run goes from some place of the window to here; the best leaves the smallest gap to the right end.
        least = window_min(gap, np.searchsorted(prefix, prefix - cap))
        wanted = np.where(np.isfinite(least), prefix + least - cap, prefix[-1])
        right = np.maximum(np.searchsorted(prefix, wanted), places)
        gap = np.where(np.isfinite(least), prefix[right] - prefix, np.inf)
    met = np.flatnonzero((right == places) & np.isfinite(gap))
    if not len(met):
        return None
    # Back from where left and right met to the ends, in even steps as far as the limit allows.
    share = prefix[-1] / (2 * len(steps))
    lefts = [int(met[_nearest(prefix[met], prefix[-1] / 2)])]
    rights = lefts[:]
    for step, (cap, right) in reversed(list(enumerate(steps))):
        left = np.arange(np.searchsorted(prefix, prefix[lefts[-1]] - cap), lefts[-1] + 1)
        room = cap - (prefix[lefts[-1]] - prefix[left])
        farthest = np.searchsorted(prefix, prefix[rights[-1]] + room, side="right") - 1
        nearest = np.maximum(right[left], rights[-1])
        is_filled = (left < lefts[-1]) & (farthest > rights[-1])
        chosen = _choose(prefix[left], step * share, nearest <= farthest, is_filled)
        low, high = max(int(nearest[chosen]), rights[-1] + 1), int(farthest[chosen])
        lefts.append(int(left[chosen]))
        rights.append(max(min(_place(prefix, prefix[-1] - step * share, low, high), high), int(nearest[chosen])))
    return lefts[::-1] + rights[1:]


def _fit_loop(prefix: Floats, slowness: Floats, limit: float) -> list[int] | None:
    """Boundaries of runs on a loop that keep the limit.

    After some ranks, `end[half, first]` is the farthest end in the second half, which begins at `half`, if the first
    half is used up to `first`; -1 if that cannot be reached.
    """
    places = np.arange(len(prefix))
    # A row per place where the second half begins, a column per end in the first half: the end in the second half.
    end = np.where(places[None, :] == 0, places[:, None], -1)
    steps: list[tuple[float, Ints]] = []
    for factor in slowness:
        cap = round_up(limit / factor)
        steps.append((cap, end))
        sums = np.where(end >= 0, prefix + prefix[end], -np.inf)
        most = -window_min(-sums, np.searchsorted(prefix, prefix - cap))
        reach = np.searchsorted(prefix, np.where(np.isfinite(most), most, 0.0) - prefix + cap, side="right") - 1
        end = np.where(np.isfinite(most) & (places[None, :] <= places[:, None]), reach, -1)
    halves = np.flatnonzero(end[places, places] >= places[-1])
    if not len(halves):
        return None
    half = int(halves[_nearest(prefix[halves], prefix[-1] / 2)])
    # Back from the ends of both halves to their beginnings, in even steps as far as the limit allows.
    share = prefix[-1] / (2 * len(steps))
    firsts, seconds = [half], [len(prefix) - 1]
    for step, (cap, end) in reversed(list(enumerate(steps))):
        first = np.arange(np.searchsorted(prefix, prefix[firsts[-1]] - cap), firsts[-1] + 1)
        room = cap - (prefix[firsts[-1]] - prefix[first])
        nearest = np.searchsorted(prefix, prefix[seconds[-1]] - room)
        farthest = np.minimum(end[half, first], seconds[-1])
        is_filled = (first < firsts[-1]) & (nearest < seconds[-1])
        chosen = _choose(prefix[first], step * share, nearest <= farthest, is_filled)
        low, high = int(nearest[chosen]), min(int(farthest[chosen]), seconds[-1] - 1)
        firsts.append(int(first[chosen]))
        wanted = _place(prefix, prefix[half] + step * share, low, high)
        seconds.append(min(max(wanted, low), int(farthest[chosen])))
    return firsts[::-1] + seconds[-2::-1]


def _choose(weights: Floats, wanted: float, allowed: Bools, preferred: Bools) -> int:
    """Of the allowed entries, preferred ones first, the one whose weight is nearest to the wanted one."""
    chosen = allowed & preferred if (allowed & preferred).any() else allowed
    return _nearest(np.where(chosen, weights, np.inf), wanted)


def _nearest(weights: Floats, wanted: float) -> int:
    return int(np.abs(weights - wanted).argmin())


def _place(prefix: Floats, wanted: float, low: int, high: int) -> int:
    """The place from low to high that has about the wanted weight before it."""
    return low + _nearest(prefix[low : high + 1], wanted) if low < high else low


def window_min(values: Floats, first: Ints) -> Floats:
    """Returns at every place along the last axis the least value from `first` of the place up to the place itself."""
    places = np.arange(values.shape[-1])
    power = np.log2(places - first + 1).astype(np.int64)
    levels = [values]
    for level in range(int(power.max())):
        before = np.full_like(values, np.inf)
        before[..., 1 << level :] = levels[-1][..., : -(1 << level)]
        levels.append(np.minimum(levels[-1], before))
    # Level k at a place is the least of the 2**k values up to it: two such stretches cover every window.
    table = np.stack(levels)
    own = table[power, ..., places]
    other = table[power, ..., first + (1 << power) - 1]
    return np.moveaxis(np.minimum(own, other), 0, -1)
