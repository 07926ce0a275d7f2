"""probing: the exact least bottleneck of runs whose weight grows with their length, in a few dozen trials.

A trial fills stage after stage up to a limit. If it fails, every stage would take the same atoms up to the least weight
that one more atom would give one of them: no smaller limit is worth a trial. If it succeeds, the heaviest stage is the
new best. Between the two the next trial is in the middle, until they meet.
"""

import math

from penstock.partitioners.atoms.uses import Floats
from penstock.partitioners.atoms.weighing import Weighing


def shortest(weighing: Weighing, slowness: Floats, at_least: float = 0.0) -> float:
    """The least load of the busiest stage, with at least one atom in each; `at_least` is a bound known before."""
    low, high, limit, step = at_least, math.inf, at_least, 0.01
    while True:
        found, load = _trial(weighing, slowness.tolist(), limit)
        if found:
            high = load
        else:
            low = max(load, math.nextafter(limit, math.inf))
        if low >= high:
            return high
        if math.isinf(high):
            limit, step = low * (1 + step), step * 2
        else:
            limit = (low + high) / 2 if high - low > 1e-9 * high else low


def _trial(weighing: Weighing, slowness: list[float], limit: float) -> tuple[bool, float]:
    """Whether the limit can be kept, with the load of the busiest stage; else the next load that may do."""
    start, busiest, following, number = 0, 0.0, math.inf, len(weighing.added) - 1
    for stage, factor in enumerate(slowness):
        # Every later stage needs an atom.
        last = number - (len(slowness) - 1 - stage)
        end = min(weighing.farthest(start, limit / factor), last)
        is_short = end < number if last == number else end <= start
        if is_short:
            needed = last if last == number else start + 1
            return False, min(following, weighing.of_run(start, needed) * factor)
        if end < last:
            following = min(following, weighing.of_run(start, end + 1) * factor)
        busiest = max(busiest, weighing.of_run(start, end) * factor)
        start = end
    return True, busiest


def reaches(weighing: Weighing, slowness: Floats, limit: float) -> list[tuple[int, int]]:
    """For every boundary, first and last included, the first and the last place where the limit can be kept."""
    number, factors = len(weighing.added) - 1, slowness.tolist()
    first, last = [number], [0]
    for stage, factor in enumerate(factors):
        last.append(min(weighing.farthest(last[-1], limit / factor), number - (len(factors) - 1 - stage)))
    for stage, factor in reversed(list(enumerate(factors))):
        first.append(max(weighing.nearest(first[-1], limit / factor), stage))
    return list(zip(reversed(first), last, strict=True))
