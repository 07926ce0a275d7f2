"""twice: whether a limit can be kept when every rank takes two runs, exactly, for loops and vees.

In a vee rank r takes the r-th run from the left and the r-th from the right: after each rank it is enough to know, for
every left end, the best right end. In a loop it takes the r-th run of the first half and the r-th of the second: the
same, for every place where the second half may begin. Runs may be empty here, and nothing is paid for what they share.
So a limit that is refused is refused to every cut, and one that is granted comes with places to start from.
"""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Placement
from penstock.partitioners.atoms.uses import Bools, Floats, Ints
from penstock.partitioners.search.minimax import nudged

_NOWHERE = 1 << 60


def is_vee(placement: Placement) -> bool:
    """Whether the second stages of the ranks follow in the opposite order of the first."""
    return _halves(placement) is not None and placement.ranks == placement.ranks[::-1]


def is_loop(placement: Placement) -> bool:
    """Whether the second stages of the ranks follow in the order of the first."""
    halves = _halves(placement)
    return halves is not None and halves[0] == halves[1]


def _halves(placement: Placement) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    ranks, number = placement.ranks, placement.num_ranks
    is_twice = len(ranks) == 2 * number and len(set(ranks[:number])) == len(set(ranks[number:])) == number
    return (ranks[:number], ranks[number:]) if is_twice else None


@dataclass(frozen=True)
class Vee:
    """Runs from both ends; `added` is the weight before each place, `slowness` is of the ranks from the outside in."""

    added: Floats
    slowness: Floats

    def within(self, limit: float) -> list[int] | None:
        """Boundaries of runs that keep the limit, or None if there are none."""
        added, places = self.added, np.arange(len(self.added))
        right, gap = np.full_like(places, places[-1]), np.where(places == 0, added[-1], np.inf)
        steps: list[tuple[float, Ints]] = []
        for factor in self.slowness:
            cap = nudged(limit / factor)
            steps.append((cap, np.where(np.isfinite(gap), right, _NOWHERE)))
            # The run on the left is from some place of the window to here; the best leaves the least gap in the end.
            least = range_least(gap, np.searchsorted(added, added - cap))
            wanted = np.where(np.isfinite(least), added + least - cap, added[-1])
            right = np.maximum(np.searchsorted(added, wanted), places)
            gap = np.where(np.isfinite(least), added[right] - added, np.inf)
        met = np.flatnonzero((right == places) & np.isfinite(gap))
        return self._path(steps, int(met[_nearest(added[met], added[-1] / 2)])) if len(met) else None

    def _path(self, steps: list[tuple[float, Ints]], met: int) -> list[int]:
        """Back from where left and right met to the ends, in even steps as far as the limit allows."""
        added, share = self.added, self.added[-1] / (2 * len(steps))
        lefts, rights = [met], [met]
        for step, (cap, right) in reversed(list(enumerate(steps))):
            left = np.arange(np.searchsorted(added, added[lefts[-1]] - cap), lefts[-1] + 1)
            room = cap - (added[lefts[-1]] - added[left])
            farthest = np.searchsorted(added, added[rights[-1]] + room, side="right") - 1
            nearest = np.maximum(right[left], rights[-1])
            is_filled = (left < lefts[-1]) & (farthest > rights[-1])
            chosen = _choice(added[left], step * share, nearest <= farthest, is_filled)
            low, high = max(int(nearest[chosen]), rights[-1] + 1), int(farthest[chosen])
            lefts.append(int(left[chosen]))
            rights.append(max(min(_place(added, added[-1] - step * share, low, high), high), int(nearest[chosen])))
        return lefts[::-1] + rights[1:]


@dataclass(frozen=True)
class Loop:
    """Runs of two halves side by side; `slowness` is that of the ranks in order."""

    added: Floats
    slowness: Floats

    def within(self, limit: float) -> list[int] | None:
        """Boundaries of runs that keep the limit, or None if there are none."""
        added, places = self.added, np.arange(len(self.added))
        # A row per place where the second half begins, a column per end in the first half: the end in the second.
        end = np.where(places[None, :] == 0, places[:, None], -1)
        steps: list[tuple[float, Ints]] = []
        for factor in self.slowness:
            cap = nudged(limit / factor)
            steps.append((cap, end))
            sums = np.where(end >= 0, added + added[end], -np.inf)
            most = -range_least(-sums, np.searchsorted(added, added - cap))
            reach = np.searchsorted(added, np.where(np.isfinite(most), most, 0.0) - added + cap, side="right") - 1
            end = np.where(np.isfinite(most) & (places[None, :] <= places[:, None]), reach, -1)
        halves = np.flatnonzero(end[places, places] >= places[-1])
        return self._path(steps, int(halves[_nearest(added[halves], added[-1] / 2)])) if len(halves) else None

    def _path(self, steps: list[tuple[float, Ints]], half: int) -> list[int]:
        """Back from the ends of both halves to their beginnings, in even steps as far as the limit allows."""
        added, share = self.added, self.added[-1] / (2 * len(steps))
        firsts, seconds = [half], [len(added) - 1]
        for step, (cap, end) in reversed(list(enumerate(steps))):
            first = np.arange(np.searchsorted(added, added[firsts[-1]] - cap), firsts[-1] + 1)
            room = cap - (added[firsts[-1]] - added[first])
            nearest = np.searchsorted(added, added[seconds[-1]] - room)
            farthest = np.minimum(end[half, first], seconds[-1])
            is_filled = (first < firsts[-1]) & (nearest < seconds[-1])
            chosen = _choice(added[first], step * share, nearest <= farthest, is_filled)
            low, high = int(nearest[chosen]), min(int(farthest[chosen]), seconds[-1] - 1)
            firsts.append(int(first[chosen]))
            wish = _place(added, added[half] + step * share, low, high)
            seconds.append(min(max(wish, low), int(farthest[chosen])))
        return firsts[::-1] + seconds[-2::-1]


def _choice(weights: Floats, wish: float, allowed: Bools, preferred: Bools) -> int:
    """Of what is allowed, if possible what is preferred, the one whose weight is nearest to the wish."""
    chosen = allowed & preferred if (allowed & preferred).any() else allowed
    return _nearest(np.where(chosen, weights, np.inf), wish)


def _nearest(weights: Floats, wish: float) -> int:
    return int(np.abs(weights - wish).argmin())


def _place(added: Floats, wish: float, low: int, high: int) -> int:
    """The place from low to high before which about the wished weight lies."""
    return low + _nearest(added[low : high + 1], wish) if low < high else low


def range_least(figures: Floats, first: Ints) -> Floats:
    """At every place along the last axis the least figure from `first` of the place up to itself."""
    places = np.arange(figures.shape[-1])
    power = np.log2(places - first + 1).astype(np.int64)
    levels = [figures]
    for level in range(int(power.max())):
        before = np.full_like(figures, np.inf)
        before[..., 1 << level :] = levels[-1][..., : -(1 << level)]
        levels.append(np.minimum(levels[-1], before))
    # Level k at a place is the least of the 2**k figures up to it: two such stretches cover every window.
    table = np.stack(levels)
    own = table[power, ..., places]
    other = table[power, ..., first + (1 << power) - 1]
    return np.moveaxis(np.minimum(own, other), 0, -1)
