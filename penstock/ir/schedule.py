"""The order of actions of every rank in one step, before lowering (Schedule) and after it (Program)."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from penstock.errors import FormatError, ScheduleError
from penstock.ir.action import COMPUTE_KINDS, MAX_MICROBATCHES, Action, Kind
from penstock.ir.orders import (
    Dependencies,
    Makers,
    Orders,
    find_dependencies,
    first_microbatches,
    kind_of,
    microbatch_of,
    pack,
    peer_of,
    stage_of,
)
from penstock.ir.placement import MAX_STAGES, Cuts, Placement
from penstock.ir.text import format_lines, read_orders, write_csv


class _Ordered:
    """The common part of Schedule and Program: stages on ranks, and an order of actions for every rank."""

    placement: Placement
    num_microbatches: int
    table: Orders

    def __post_init__(self) -> None:
        if not 1 <= self.num_microbatches <= MAX_MICROBATCHES:
            problem = f"microbatches must be a whole number from 1 to {MAX_MICROBATCHES}"
            raise ScheduleError(problem, got=self.num_microbatches)
        if self.num_stages > MAX_STAGES:
            raise ScheduleError(f"a schedule must have at most {MAX_STAGES} stages", got=self.num_stages)
        if len(self.table) != self.num_ranks:
            raise ScheduleError("there must be one order per rank", orders=len(self.table), ranks=self.num_ranks)
        passes = self.table.passes
        rank_of_stage = np.full(MAX_STAGES, -1)
        rank_of_stage[: self.num_stages] = self.placement.ranks
        rank = self.table.rank_of[passes.index]
        wrong = (rank_of_stage[passes.stage] != rank) | (passes.microbatch >= self.num_microbatches)
        if wrong.any():
            first = int(np.argmax(wrong))
            index = int(passes.index[first])
            raise ScheduleError(
                "an action must be of a stage and a microbatch of its rank",
                action=self.table.action(index),
                rank=int(rank[first]),
                position=self.table.position(index),
                stages_of_the_rank=self.placement.stages[int(rank[first])],
                microbatches=self.num_microbatches,
            )

    @property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """The orders as tuples of actions, one per rank."""
        return self.table.actions

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.placement.num_stages

    @property
    def is_forward_only(self) -> bool:
        """Whether it has no backward and no reduction at all: such an order is for evaluation."""
        kinds = [Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.OVERLAP, Kind.REDUCE]
        return not np.bincount(self.table.kinds, minlength=len(Kind))[kinds].any()

    @cached_property
    def makers(self) -> Makers:
        """The action that makes each fact."""
        return Makers(self.table.passes, self.num_stages, self.num_microbatches)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The order as CSV, in the grammar of torch.distributed.pipelining.

        Args:
            path: a file to write; None: none

        Returns:
            The text.
        """
        return write_csv(self.table, path)

    def __str__(self) -> str:
        return format_lines(self.table)


@dataclass(frozen=True)
class Schedule(_Ordered):
    """Which stage runs which microbatch in which order on every rank; no messages, no times.

    `table` holds the orders compactly; `orders` shows them as tuples of actions.
    """

    placement: Placement
    """the rank of every stage"""
    num_microbatches: int
    """number of microbatches"""
    table: Orders
    """the orders in compact form"""

    def __post_init__(self) -> None:
        super().__post_init__()
        foreign = ~np.isin(self.table.kinds, COMPUTE_KINDS)
        if foreign.any():
            action = self.table.action(int(np.argmax(foreign)))
            raise ScheduleError("a schedule must hold compute actions only", action=action, hint="Program.from_csv")

    @classmethod
    def of(cls, placement: Placement, num_microbatches: int, orders: Iterable[Iterable[Action]]) -> "Schedule":
        """A schedule from action objects.

        Args:
            placement: the rank of every stage
            num_microbatches: number of microbatches
            orders: the compute actions of every rank, in order
        """
        return cls(placement, num_microbatches, Orders.of(orders))

    @classmethod
    def from_csv(cls, source: str | Path) -> "Schedule":
        """A schedule from CSV: a row per rank, a cell per action, an empty cell for a bubble.

        Args:
            source: the path of a file, or its text

        Raises:
            FormatError: if it cannot be read, with line and column
            ScheduleError: if it has other than compute actions
        """
        table = read_orders(source)
        placement, num_microbatches = _infer_sizes(table)
        return cls(placement, num_microbatches, table)

    def with_cuts(self, cuts: Cuts | None = None) -> "Program":
        """The same order for a model with these cuts, without messages; None: every stage reads the previous one."""
        return Program(self.placement, self.num_microbatches, cuts or Cuts.chain(self.num_stages), self.table)

    def dependencies(self) -> Dependencies:
        """All dependencies between its actions, over a chain of stages."""
        return find_dependencies(self.table.passes, self.makers, Cuts.chain(self.num_stages))

    def first(self, num_microbatches: int) -> "Schedule":
        """The same order for the first `num_microbatches` only: itself if it has no more.

        Overlapped pairs of a longer order become single passes.
        """
        if num_microbatches >= self.num_microbatches:
            return self
        kept = self.table.passes.microbatch < num_microbatches
        return Schedule(self.placement, num_microbatches, self.table.select_passes(kept))

    def repeated(self, num_microbatches: int) -> "Schedule":
        """The same order for any number of microbatches: its beginning, or itself over and over.

        A rank starts a repetition when it has finished the one before. Overlapped pairs become single passes, unless
        the order stays as it is.
        """
        rounds, rest = divmod(num_microbatches, self.num_microbatches)
        parts = [self] * rounds + ([self.first(rest)] if rest else [])
        if len(parts) == 1:
            return parts[0]
        tables = [part.table.select_passes(np.ones(len(part.table.passes.index), dtype=bool)) for part in parts]
        shifts = [pack(0, 0, number * self.num_microbatches) for number in range(len(parts))]
        orders = [
            np.concatenate([table.rank(rank) + shift for table, shift in zip(tables, shifts, strict=True)])
            for rank in range(self.num_ranks)
        ]
        return Schedule(self.placement, num_microbatches, Orders(orders))

    def forwards(self) -> "Schedule":
        """The same order without any backward."""
        kept = self.table.passes.kind == Kind.FORWARD
        return Schedule(self.placement, self.num_microbatches, self.table.select_passes(kept))


@dataclass(frozen=True)
class Program(_Ordered):
    """A Schedule with messages, reductions, shard moves and frees; ready to be verified, simulated and run.

    `table` holds the orders compactly; `orders` shows them as tuples of actions.
    """

    placement: Placement
    """the rank of every stage"""
    num_microbatches: int
    """number of microbatches"""
    cuts: Cuts
    """which stage reads values of which other stage"""
    table: Orders
    """the orders in compact form"""

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds, codes = self.table.kinds, self.table.codes
        unknown = ((kinds == Kind.SEND) | (kinds == Kind.RECV)) & (peer_of(codes) >= self.num_stages)
        if unknown.any():
            action = self.table.action(int(np.argmax(unknown)))
            raise ScheduleError("a message names a stage that does not exist", action=action, stages=self.num_stages)
        if self.cuts.num_stages != self.num_stages:
            raise ScheduleError(
                "cuts and placement must have the same number of stages",
                cuts=self.cuts.num_stages,
                placement=self.num_stages,
            )

    @classmethod
    def of(
        cls, placement: Placement, num_microbatches: int, cuts: Cuts, orders: Iterable[Iterable[Action]]
    ) -> "Program":
        """A program from action objects.

        Args:
            placement: the rank of every stage
            num_microbatches: number of microbatches
            cuts: which stage reads which
            orders: the actions of every rank, in order
        """
        return cls(placement, num_microbatches, cuts, Orders.of(orders))

    @classmethod
    def from_csv(cls, source: str | Path, cuts: Cuts | None = None) -> "Program":
        """A program from CSV.

        Args:
            source: the path of a file, or its text
            cuts: which stage reads which; None: a chain, plus the edges that messages name

        Raises:
            FormatError: if it cannot be read, with line and column
        """
        table = read_orders(source)
        placement, num_microbatches = _infer_sizes(table)
        return cls(placement, num_microbatches, cuts or _infer_cuts(table, placement), table)

    @property
    def schedule(self) -> Schedule:
        """Its compute actions."""
        table = self.table.select(np.isin(self.table.kinds, COMPUTE_KINDS))
        return Schedule(self.placement, self.num_microbatches, table)

    def with_cuts(self, cuts: Cuts) -> "Program":
        """The same orders for a model with these cuts, without the messages of other edges."""
        kinds, ends = self.table.kinds, (stage_of(self.table.codes), peer_of(self.table.codes))
        sends = kinds == Kind.SEND
        source, target = np.where(sends, *ends), np.where(sends, *ends[::-1])
        pairs = [*cuts.edges, *(edge[::-1] for edge in cuts.gradient_edges)]
        needed = [start * self.num_stages + end for start, end in pairs]
        is_message = sends | (kinds == Kind.RECV)
        keep = ~is_message | np.isin(source * self.num_stages + target, needed)
        return Program(self.placement, self.num_microbatches, cuts, self.table.select(keep))

    def first(self, num_microbatches: int) -> "Program":
        """The same program for the first `num_microbatches` only."""
        if num_microbatches >= self.num_microbatches:
            return self
        orders = [first_microbatches(self.table.rank(rank), num_microbatches) for rank in range(self.num_ranks)]
        return Program(self.placement, num_microbatches, self.cuts, Orders(orders))

    def forwards(self) -> "Program":
        """The same program without backwards and what belongs to them."""
        codes, kinds = self.table.codes, self.table.kinds
        is_pair, is_later = kinds == Kind.OVERLAP, peer_of(codes) > stage_of(codes)
        is_value = ((kinds == Kind.SEND) & is_later) | ((kinds == Kind.RECV) & ~is_later)
        codes = np.where(is_pair, pack(Kind.FORWARD, stage_of(codes), microbatch_of(codes)), codes)
        kept = is_pair | (kinds == Kind.FORWARD) | is_value
        codes, ranks = codes[kept], self.table.rank_of[kept]
        table = Orders([codes[ranks == rank] for rank in range(self.num_ranks)])
        return Program(self.placement, self.num_microbatches, self.cuts, table)

    def with_table(self, table: Orders) -> "Program":
        """The same program with other orders, which are not checked: for passes that insert or move actions."""
        program = object.__new__(Program)
        vars(program).update(
            placement=self.placement, num_microbatches=self.num_microbatches, cuts=self.cuts, table=table
        )
        return program

    def dependencies(self) -> Dependencies:
        """All dependencies between its compute actions, over its cuts."""
        return find_dependencies(self.table.passes, self.makers, self.cuts)


def read_schedule(source: str | Path) -> Schedule | Program:
    """A schedule from a CSV file or its text, or a program if it has other than compute actions."""
    program = Program.from_csv(source)
    has_other = set(program.table.kinds.tolist()) - set(COMPUTE_KINDS)
    return program if has_other else program.schedule


def _infer_sizes(orders: Orders) -> tuple[Placement, int]:
    """The placement and the number of microbatches of orders read from a file."""
    passes = orders.passes
    ranks = orders.rank_of[passes.index]
    if not len(ranks):
        raise FormatError("a schedule must have actions", ranks=len(orders))
    rank_of_stage = np.full(int(passes.stage.max()) + 1, -1)
    rank_of_stage[passes.stage] = ranks
    if (differs := rank_of_stage[passes.stage] != ranks).any():
        stage = int(passes.stage[differs][0])
        raise FormatError(
            "a stage must be on one rank", stage=stage, ranks=sorted(set(ranks[passes.stage == stage].tolist()))
        )
    if (rank_of_stage < 0).any():
        raise FormatError(
            "every stage must have actions", stage=int(np.argmax(rank_of_stage < 0)), stages=len(rank_of_stage)
        )
    if missing := set(range(len(orders))) - set(rank_of_stage.tolist()):
        raise FormatError("every rank must have actions", rank=min(missing), ranks=len(orders))
    return Placement(tuple(rank_of_stage.tolist())), int(passes.microbatch.max()) + 1


def _infer_cuts(orders: Orders, placement: Placement) -> Cuts:
    """A chain of stages plus the edges of messages; an edge without gradient messages is one without gradient."""
    messages = orders.codes[np.isin(orders.kinds, (Kind.SEND, Kind.RECV))]
    sends = kind_of(messages) == Kind.SEND
    source = np.where(sends, stage_of(messages), peer_of(messages))
    target = np.where(sends, peer_of(messages), stage_of(messages))
    if len(target) and max(int(source.max()), int(target.max())) >= placement.num_stages:
        raise FormatError("a message names a stage that has no actions", stages=placement.num_stages)
    pairs = set(zip(source.tolist(), target.tolist(), strict=True))
    chain = set(Cuts.chain(placement.num_stages).edges)
    edges = chain | {(a, b) for a, b in pairs if a < b} | {(b, a) for a, b in pairs if a > b}
    without_gradient = {edge for edge in edges - chain if edge[::-1] not in pairs}
    return Cuts.of(placement.num_stages, edges, without_gradient)
