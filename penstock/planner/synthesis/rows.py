"""Rows: the passes as a table, a row per stage and kind, a column per microbatch.

Row 3 s holds the forwards of stage s, row 3 s + 1 its input gradients, row 3 s + 2 its weight gradients. Everything
that is said of rows can be read in mirrored time as well: needs turn round, and what gave back bytes takes them. An
order of the mirrored rows, read backwards, is an order of the rows, which is how ends get the same care as beginnings.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.planner.synthesis.shop import B, F, I, Message, Shop, W

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Need(NamedTuple):
    """A pass of `row` needs the pass of `needed` of its microbatch, over a link or, if that is -1, on its own rank."""

    row: int
    needed: int
    link: int = -1
    occupied: float = 0.0
    latency: float = 0.0

    @property
    def lag(self) -> float:
        """Seconds between the end of the one and the start of the other."""
        return self.occupied + self.latency


@dataclass(frozen=True)
class Rows:
    """What the greedy runs and the bound read."""

    shop: Shop
    seconds: Floats
    taken: Floats
    """bytes that a pass takes; below 0 it gives them back"""
    needs: tuple[Need, ...]
    before: Floats
    """per rank, seconds that must pass before it starts"""
    after: Floats
    """per rank, seconds that count after it has ended"""
    whole: frozenset[int] = frozenset()
    """stages whose backward is not split: its first part is all of it, its second nothing"""
    is_mirrored: bool = False

    @classmethod
    def split(cls, shop: Shop, whole: Collection[int] = ()) -> "Rows":
        """Backwards in two parts, except those of the stages in `whole`."""
        seconds, taken = list(shop.seconds), list(shop.taken)
        for stage in whole:
            for table in (seconds, taken):
                table[stage << 2 | I], table[stage << 2 | W] = table[stage << 2 | B], 0.0
        return replace(cls._of(shop, seconds, taken), whole=frozenset(whole))

    @classmethod
    def least(cls, shop: Shop) -> "Rows":
        """The least that passes can take, whether backwards are split or not."""
        seconds = list(shop.seconds)
        for stage in range(len(shop.home)):
            whole, first, second = (seconds[stage << 2 | kind] for kind in (B, I, W))
            seconds[stage << 2 | I] = min(first, whole)
            seconds[stage << 2 | W] = max(min(whole, first + second) - seconds[stage << 2 | I], 0.0)
        return cls._of(shop, seconds, list(shop.taken))

    @classmethod
    def _of(cls, shop: Shop, seconds: list[float], taken: list[float]) -> "Rows":
        own = [need for s in range(len(shop.home)) for need in (Need(3 * s + 1, 3 * s), Need(3 * s + 2, 3 * s + 1))]
        none = np.zeros(shop.num_ranks)
        needs = (*own, *_between(shop.outputs, lambda stage: 3 * stage), *_between(shop.gradients, _gradient_row))
        return cls(shop, _by_row(seconds), _by_row(taken), needs, none, none)

    def mirrored(self) -> "Rows":
        """The same in mirrored time."""
        needs = tuple(Need(need.needed, need.row, *need[2:]) for need in self.needs)
        return replace(
            self,
            taken=-self.taken,
            needs=needs,
            before=self.after,
            after=self.before,
            is_mirrored=not self.is_mirrored,
        )

    def ending(self, after: Floats) -> "Rows":
        """The same with so many seconds counted after each rank's end."""
        return replace(self, after=after)

    @property
    def share(self) -> float:
        """The part of its passes' seconds that a rank needs at least: an overlapped pair may hide the rest."""
        return 1.0 - self.shop.problem.cluster.overlap / 2

    @cached_property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.seconds)

    @property
    def num_passes(self) -> int:
        """How many passes there are, those without seconds included."""
        return self.num_rows * self.shop.num_microbatches

    @cached_property
    def rank(self) -> Ints:
        """The rank of every row."""
        return np.repeat(np.asarray(self.shop.home, dtype=np.int64), 3)

    @cached_property
    def of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The rows of every rank."""
        return tuple(tuple(3 * s + part for s in stages for part in range(3)) for stages in self.shop.stages)

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """All rows, each after those that it needs."""
        stages = range(len(self.shop.home))
        forward = (*(3 * s for s in stages), *(3 * s + 1 for s in reversed(stages)), *(3 * s + 2 for s in stages))
        return forward[::-1] if self.is_mirrored else forward

    @cached_property
    def needed_by(self) -> tuple[tuple[Need, ...], ...]:
        """The needs of every row."""
        found: list[list[Need]] = [[] for _ in range(self.num_rows)]
        for need in self.needs:
            found[need.row].append(need)
        return tuple(map(tuple, found))

    @cached_property
    def precedes(self) -> NDArray[np.bool_]:
        """`precedes[a, b]`: a pass of row a comes before that of row b of the same microbatch, or is the same."""
        result = np.eye(self.num_rows, dtype=np.bool_)
        for row in self.sequence:
            for need in self.needed_by[row]:
                result[:, row] |= result[:, need.needed]
        return result

    def turned(self, starts: Floats, length: Floats) -> Floats:
        """Starts of whole runs (a run, a row, a microbatch) as they look in mirrored time."""
        ends = starts + self.seconds[:, None]
        return np.asarray((length[:, None, None] - ends)[:, :, ::-1])


def _gradient_row(stage: int) -> int:
    return 3 * stage + 1


def _between(sent: tuple[tuple[Message, ...], ...], row_of: Callable[[int], int]) -> list[Need]:
    return [
        Need(row_of(message.target), row_of(stage), message.link, message.seconds, message.latency)
        for stage, messages in enumerate(sent)
        for message in messages
    ]


def _by_row(by_letter: list[float]) -> Floats:
    table = np.asarray(by_letter, dtype=np.float64).reshape(-1, 4)
    return np.ascontiguousarray(table[:, [F, I, W]]).ravel()
