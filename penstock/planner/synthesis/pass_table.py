"""The passes as a table: a row per stage and fact that its passes make, a column per microbatch.

Row 3 s holds the forwards of stage s, row 3 s + 1 its input gradients, row 3 s + 2 its weight gradients: 3 s + Fact.
The table can be mirrored in time: needs are reversed, and passes that freed bytes allocate them. An order of the
mirrored table, read backwards, is an order of the table, so that a search can build it from the end of the step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.ir import Bools, Fact, Floats, Forward, InputGrad, Ints, WeightGrad, needs
from penstock.planner.synthesis.problem import B, F, I, OutgoingMessage, ScheduleProblem, W

ROWS_OF_KIND = {F: (0,), I: (1,), W: (2,), B: (1, 2)}
"""the rows of a stage that a pass of each kind fills"""


class PassNeed(NamedTuple):
    """A pass of `row` needs that of `needed` of its microbatch, over a link or, if `link` is -1, on its own rank."""

    row: int
    needed: int
    link: int = -1
    occupied: float = 0.0
    latency: float = 0.0

    @property
    def lag(self) -> float:
        """Seconds between the end of the needed pass and the start of the other."""
        return self.occupied + self.latency


@dataclass(frozen=True)
class PassTable:
    """Seconds, bytes and needs by row, for greedy runs, bounds and the solver."""

    problem: ScheduleProblem
    seconds: Floats
    """by row; the least of its passes if microbatches differ"""
    allocated: Floats
    """bytes that a pass allocates; below 0 it frees them"""
    needs: tuple[PassNeed, ...]
    before: Floats
    """per rank, seconds that must pass before it starts"""
    after: Floats
    """per rank, seconds that count after it has ended"""
    unsplit: frozenset[int] = frozenset()
    """stages whose backward is not split: its first part is all of it, its second takes nothing"""
    is_mirrored: bool = False
    unequal: Floats | None = None
    """seconds by row and microbatch, if microbatches differ"""

    @classmethod
    def split(cls, problem: ScheduleProblem, unsplit: Collection[int] = ()) -> "PassTable":
        """Returns the table with backwards in two parts, except those of the stages in `unsplit`."""
        seconds, allocated = _seconds(problem), np.array(problem.allocated)[:, None]
        for stage in unsplit:
            for column in (seconds, allocated):
                column[stage << 2 | I], column[stage << 2 | W] = column[stage << 2 | B], 0.0
        rows = _by_row(seconds)
        table = cls._of(problem, rows.min(axis=1), _by_row(allocated)[:, 0])
        is_unequal = problem.unequal_seconds is not None
        return replace(table, unsplit=frozenset(unsplit), unequal=rows if is_unequal else None)

    @classmethod
    def least(cls, problem: ScheduleProblem) -> "PassTable":
        """Returns the table with the least seconds that passes can take, whether backwards are split or not.

        If microbatches differ, every row has the least seconds and bytes of any of them, as their order is free.
        """
        is_unequal = problem.unequal_seconds is not None
        least = replace(problem, costs=problem.costs.least()) if is_unequal else problem
        table = cls._of(least, _least_rows(least)[:, 0], _by_row(np.array(least.allocated)[:, None])[:, 0])
        return replace(table, unequal=_least_rows(problem)) if is_unequal else table

    @classmethod
    def _of(cls, problem: ScheduleProblem, seconds: Floats, allocated: Floats) -> "PassTable":
        """The table for seconds and bytes by row."""
        cuts = problem.cuts
        # The needs between passes of one stage, and those over messages from other stages.
        own = [
            PassNeed(3 * stage + row, 3 * stage + need.fact)
            for stage in range(problem.placement.num_stages)
            for row, action in enumerate((Forward, InputGrad, WeightGrad))
            for need in needs(action(stage, 0), cuts)
            if need.stage == stage
        ]
        sent = (*_needs_of(problem.outputs, Fact.OUTPUT), *_needs_of(problem.gradients, Fact.INPUT_GRADIENT))
        none = np.zeros(problem.placement.num_ranks)
        return cls(problem, seconds, allocated, (*own, *sent), none, none)

    def mirrored(self) -> "PassTable":
        """Returns the table in mirrored time."""
        return replace(
            self,
            allocated=-self.allocated,
            needs=tuple(need._replace(row=need.needed, needed=need.row) for need in self.needs),
            before=self.after,
            after=self.before,
            is_mirrored=not self.is_mirrored,
            unequal=None if self.unequal is None else self.unequal[:, ::-1],
        )

    @property
    def by_microbatch(self) -> Floats:
        """Seconds by row and microbatch; a single column if microbatches do not differ."""
        return self.seconds[:, None] if self.unequal is None else self.unequal

    def work(self, rows: Sequence[int]) -> float:
        """Returns the seconds of all passes of some rows."""
        if self.unequal is not None:
            return float(self.unequal[list(rows)].sum())
        return float(self.seconds[list(rows)].sum()) * self.problem.num_microbatches

    @property
    def share(self) -> float:
        """The part of its passes' seconds that a rank needs at least: an overlapped pair may hide the rest."""
        return 1.0 - self.problem.cluster.overlap / 2

    @cached_property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.seconds)

    @property
    def num_passes(self) -> int:
        """Number of passes, including those that take no time."""
        return self.num_rows * self.problem.num_microbatches

    @cached_property
    def rank(self) -> Ints:
        """The rank of every row."""
        return np.repeat(np.asarray(self.problem.placement.ranks, dtype=np.int64), 3)

    @cached_property
    def rows_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The rows of every rank."""
        held = self.problem.placement.stages
        return tuple(tuple(3 * stage + part for stage in stages for part in range(3)) for stages in held)

    def freeing_rows(self, stage: int) -> list[int]:
        """Returns the rows of a stage whose passes free bytes."""
        return [row for row in range(3 * stage, 3 * stage + 3) if self.allocated[row] < 0]

    @property
    def busiest_seconds(self) -> float:
        """Seconds of one microbatch on the rank that has the most work with it."""
        return max(float(self.seconds[list(rows)].sum()) for rows in self.rows_of_rank)

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """All rows, each after those that it needs."""
        stages = range(self.problem.placement.num_stages)
        forward = (*(3 * s for s in stages), *(3 * s + 1 for s in reversed(stages)), *(3 * s + 2 for s in stages))
        return forward[::-1] if self.is_mirrored else forward

    @cached_property
    def needed_by(self) -> tuple[tuple[PassNeed, ...], ...]:
        """The needs of every row."""
        found: list[list[PassNeed]] = [[] for _ in range(self.num_rows)]
        for need in self.needs:
            found[need.row].append(need)
        return tuple(map(tuple, found))

    @cached_property
    def precedes(self) -> Bools:
        """`precedes[a, b]`: a pass of row a comes before that of row b of the same microbatch, or is the same."""
        result = np.eye(self.num_rows, dtype=np.bool_)
        for row in self.sequence:
            for need in self.needed_by[row]:
                result[:, row] |= result[:, need.needed]
        return result

    def least_delays(self, row: int) -> Floats:
        """Returns the least seconds from the start of a pass to that of every other of its microbatch; -inf if none."""
        found = np.full(self.num_rows, -np.inf)
        found[row] = 0.0
        for other in self.sequence:
            for need in self.needed_by[other]:
                found[other] = max(found[other], found[need.needed] + self.seconds[need.needed] + need.lag)
        return found

    def mirror_starts(self, starts: Floats, length: Floats) -> Floats:
        """Returns starts (a run, a row, a microbatch) as they are in mirrored time."""
        ends = starts + self.by_microbatch
        return np.asarray((length[:, None, None] - ends)[:, :, ::-1])


def _needs_of(sent: tuple[tuple[OutgoingMessage, ...], ...], fact: Fact) -> list[PassNeed]:
    return [
        PassNeed(3 * message.target + fact, 3 * stage + fact, message.link, message.occupied, message.latency)
        for stage, messages in enumerate(sent)
        for message in messages
    ]


def _by_row(by_pass_id: Floats) -> Floats:
    """The entries of rows from those of pass ids, both along the first axis."""
    table = by_pass_id.reshape(-1, 4, by_pass_id.shape[1])
    return np.ascontiguousarray(table[:, [F, I, W]]).reshape(-1, by_pass_id.shape[1])


def _seconds(problem: ScheduleProblem) -> Floats:
    """Seconds by pass id and microbatch; a single column if microbatches do not differ."""
    return np.array(problem.unequal_seconds or [(each,) for each in problem.seconds])


def _least_rows(problem: ScheduleProblem) -> Floats:
    """By row and microbatch the least seconds of a pass; those of both parts of a backward add up to its least."""
    seconds = _seconds(problem)
    forward, whole, first, second = (seconds[kind::4] for kind in (F, B, I, W))
    parts = np.minimum(first, whole)
    rest = np.maximum(np.minimum(whole, first + second) - parts, 0.0)
    return np.stack((forward, parts, rest), axis=1).reshape(-1, seconds.shape[1])
