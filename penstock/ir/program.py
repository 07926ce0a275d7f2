"""Program: a Schedule with messages, reductions, shard moves and frees spelled out."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ScheduleError
from penstock.ir import text
from penstock.ir.action import Action, Kind
from penstock.ir.code import decode, peer_of
from penstock.ir.cuts import Cuts
from penstock.ir.orders import Orders
from penstock.ir.placement import Placement
from penstock.ir.schedule import Ordered, check_homes, check_sizes


@dataclass(frozen=True)
class Program(Ordered):
    """Everything each rank does in one step, in order; ready to be proven, simulated and run.

    `table` holds the orders compactly; `orders` shows them as tuples of actions.
    """

    placement: Placement
    num_microbatches: int
    cuts: Cuts
    table: Orders

    def __post_init__(self) -> None:
        check_sizes(self.placement, self.num_microbatches, self.table)
        check_homes(self.placement, self.num_microbatches, self.table)
        self._check_peers()
        if self.cuts.num_stages != self.placement.num_stages:
            raise ScheduleError(
                "cuts and placement differ in the number of stages",
                cuts=self.cuts.num_stages,
                placement=self.placement.num_stages,
            )

    def _check_peers(self) -> None:
        kinds, codes = self.table.kinds, self.table.codes
        astray = codes[((kinds == Kind.SEND) | (kinds == Kind.RECV)) & (peer_of(codes) >= self.num_stages)]
        if len(astray):
            action = decode(astray[:1])[0]
            raise ScheduleError("a message names a stage that does not exist", action=action, stages=self.num_stages)

    @classmethod
    def of(
        cls, placement: Placement, num_microbatches: int, cuts: Cuts, orders: Iterable[Iterable[Action]]
    ) -> "Program":
        """A program from action objects."""
        return cls(placement, num_microbatches, cuts, Orders.of(orders))

    def with_table(self, table: Orders) -> "Program":
        """The same program with other orders."""
        return Program(self.placement, self.num_microbatches, self.cuts, table)

    @classmethod
    def from_csv(cls, source: str | Path, cuts: Cuts | None = None) -> "Program":
        """A program from a CSV file or its text. Without cuts: a chain, plus the edges that messages name."""
        table = text.parse(text.read(source))
        placement, num_microbatches = text.infer(table)
        return cls(placement, num_microbatches, cuts or text.infer_cuts(table, placement), table)
