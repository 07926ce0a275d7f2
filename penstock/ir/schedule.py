"""Schedule: the order of compute actions of every rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import text
from penstock.ir.action import COMPUTE_KINDS, MAX_MICROBATCHES, Action, Kind
from penstock.ir.code import decode, pack
from penstock.ir.cuts import MAX_STAGES
from penstock.ir.orders import Orders
from penstock.ir.placement import Placement


class Ordered:
    """What a Schedule and a Program have in common: stages on ranks, and an order of actions for every rank."""

    placement: Placement
    num_microbatches: int
    table: Orders

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The orders as tuples of actions, one per rank."""
        return self.table.actions

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.placement.num_stages

    def to_csv(self, path: str | Path | None = None) -> str:
        """The CSV text; also written to the path when one is given."""
        return text.write(self.table, path)

    def __str__(self) -> str:
        return text.lines(self.table)


@dataclass(frozen=True)
class Schedule(Ordered):
    """Which stage runs which microbatch in which order on every rank; no messages, no times.

    `table` holds the orders compactly; `orders` shows them as tuples of actions.
    """

    placement: Placement
    num_microbatches: int
    table: Orders

    def __post_init__(self) -> None:
        check_sizes(self.placement, self.num_microbatches, self.table)
        check_homes(self.placement, self.num_microbatches, self.table)
        foreign = ~np.isin(self.table.kinds, COMPUTE_KINDS)
        if foreign.any():
            action = decode(self.table.codes[foreign][:1])[0]
            raise ScheduleError("a schedule holds compute actions only", action=action, hint="read it as a Program")

    @classmethod
    def of(cls, placement: Placement, num_microbatches: int, orders: Iterable[Iterable[Action]]) -> "Schedule":
        """A schedule from action objects."""
        return cls(placement, num_microbatches, Orders.of(orders))

    def first(self, num_microbatches: int) -> "Schedule":
        """The same order for the first so many microbatches; overlapped pairs are taken apart."""
        if num_microbatches >= self.num_microbatches:
            return self
        kept = self.table.passes.microbatch < num_microbatches
        return Schedule(self.placement, num_microbatches, self.table.taken_apart(kept))

    def repeated(self, num_microbatches: int) -> "Schedule":
        """The same order for any number of microbatches: its beginning, or itself over and over.

        A round begins on a rank when the rank has ended the one before. Overlapped pairs are taken apart.
        """
        rounds, rest = divmod(num_microbatches, self.num_microbatches)
        parts = [self.first(self.num_microbatches)] * rounds + ([self.first(rest)] if rest else [])
        tables = [part.table.taken_apart(np.ones(len(part.table.passes.index), dtype=bool)) for part in parts]
        shifts = [pack(0, 0, place * self.num_microbatches) for place in range(len(parts))]
        orders = [
            np.concatenate([table.rank(rank) + shift for table, shift in zip(tables, shifts, strict=True)])
            for rank in range(self.num_ranks)
        ]
        return Schedule(self.placement, num_microbatches, Orders(orders)) if len(parts) > 1 else parts[0]

    def forwards(self) -> "Schedule":
        """The same order without any backward."""
        kept = self.table.passes.kind == Kind.FORWARD
        return Schedule(self.placement, self.num_microbatches, self.table.taken_apart(kept))

    @classmethod
    def from_csv(cls, source: str | Path) -> "Schedule":
        """A schedule from a CSV file or its text: a row per rank, a cell per action, an empty cell for a bubble."""
        table = text.parse(text.read(source))
        placement, num_microbatches = text.infer(table)
        return cls(placement, num_microbatches, table)


def check_sizes(placement: Placement, num_microbatches: int, table: Orders) -> None:
    """Refuse sizes that no order can have, or that do not agree with each other."""
    if not 1 <= num_microbatches <= MAX_MICROBATCHES:
        raise ScheduleError("microbatches out of range", microbatches=num_microbatches, limit=MAX_MICROBATCHES)
    if placement.num_stages > MAX_STAGES:
        raise ScheduleError("too many stages", stages=placement.num_stages, limit=MAX_STAGES)
    if len(table) != placement.num_ranks:
        raise ScheduleError("one order per rank is needed", orders=len(table), ranks=placement.num_ranks)


def check_homes(placement: Placement, num_microbatches: int, table: Orders) -> None:
    """Refuse an action of a stage that is not on its rank, or of a microbatch that does not exist."""
    passes = table.passes
    home = np.full(MAX_STAGES, -1)
    home[: placement.num_stages] = placement.ranks
    rank = table.rank_of[passes.index]
    wrong = (home[passes.stage] != rank) | (passes.microbatch >= num_microbatches)
    if not wrong.any():
        return
    first = int(np.argmax(wrong))
    place = int(passes.index[first])
    raise ScheduleError(
        "an action of a stage or microbatch that this rank does not hold",
        action=decode(table.codes[place : place + 1])[0],
        rank=int(rank[first]),
        position=place - int(table.starts[rank[first]]),
        stages_of_the_rank=placement.stages[int(rank[first])],
        microbatches=num_microbatches,
    )
