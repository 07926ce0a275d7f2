"""Finds the least maximum weight of consecutive runs, exactly, where longer runs weigh more.

A trial fills stage after stage up to a limit. If it fails, every stage would take the same atoms for all limits below
the least weight that one more atom would give one of them: that weight is the next limit worth a trial. If it succeeds,
the heaviest stage is the new best. Trials bisect between the two until they meet, after a few dozen.
"""

import math

from penstock.partitioners.atoms import Floats
from penstock.partitioners.costs import RunWeights


def least_load(weights: RunWeights, slowness: Floats) -> float:
    """Returns the least load of the busiest stage, with at least one atom in each."""
    low, high, limit, step = 0.0, math.inf, 0.0, 0.01
    while True:
        is_kept, load = _trial(weights, slowness.tolist(), limit)
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


def _trial(weights: RunWeights, slowness: list[float], limit: float) -> tuple[bool, float]:
    """Returns whether the limit can be kept, with the load of the busiest stage or the next limit to try."""
    start, busiest, following, number = 0, 0.0, math.inf, len(weights.added) - 1
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
    number, factors = len(weights.added) - 1, slowness.tolist()
    first, last = [number], [0]
    for stage, factor in enumerate(factors):
        last.append(min(weights.last_end(last[-1], limit / factor), number - (len(factors) - 1 - stage)))
    for stage, factor in reversed(list(enumerate(factors))):
        first.append(max(weights.first_start(first[-1], limit / factor), stage))
    return list(zip(reversed(first), last, strict=True))


def round_up(limit: float) -> float:
    """Returns the limit plus rounding, so that equal sums in another order keep it."""
    return limit * (1 + 1e-12)
