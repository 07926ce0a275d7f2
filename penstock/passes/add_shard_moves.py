"""Gathers a stage's sharded parameters before they are needed and drops them to make room for others.

At any time the next few distinct stages that a rank computes are gathered, so that gathering overlaps with compute.
"""

from dataclasses import dataclass

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir import COMPUTE_KINDS, Codes, Kind, Program, as_int, pack
from penstock.passes.base import Pass


@dataclass(frozen=True)
class AddShardMoves(Pass):
    """Unshard a stage before use, Reshard it when it is not among the next `ahead` stages."""

    ahead: int = 3
    """how many distinct stages of a rank may be gathered at once, the one that computes included"""
    name = "add_shard_moves"

    def __post_init__(self) -> None:
        ahead = as_int(self.ahead)
        if ahead is None or ahead < 1:
            raise ScheduleError("ahead must be a whole number, 1 or more", ahead=repr(self.ahead))

    def __call__(self, program: Program) -> Program:
        uses = _find_uses(program)
        moves = [_find_moves(program, uses, rank, self.ahead) for rank in range(program.num_ranks)]
        before, codes = (np.concatenate(column) for column in zip(*moves, strict=True))
        ranks = np.repeat(np.arange(program.num_ranks), [len(own) for own, _ in moves])
        return program.with_table(program.table.insert(before, ranks, codes))


def _find_uses(program: Program) -> list[Codes]:
    """Per stage the indices of the compute actions that use it, ascending."""
    passes = program.table.passes
    chosen = np.flatnonzero(np.isin(passes.kind, COMPUTE_KINDS))
    chosen = chosen[np.argsort(passes.stage[chosen] * len(program.table.codes) + passes.index[chosen])]
    sizes = np.bincount(passes.stage[chosen], minlength=program.num_stages)
    return np.split(passes.index[chosen], np.cumsum(sizes)[:-1])


def _find_moves(program: Program, uses: list[Codes], rank: int, ahead: int) -> tuple[Codes, Codes]:
    """Where one rank gathers and drops its stages: (index to insert before, action)."""
    first, end = (int(place) for place in program.table.starts[rank : rank + 2])
    stages = np.asarray(program.placement.stages[rank])
    steps = first + np.flatnonzero(np.isin(program.table.kinds[first:end], COMPUTE_KINDS))
    # Per stage and step the index of the stage's next use, there or later; `end` if there is none.
    next_use = np.stack([np.append(uses[stage], end)[np.searchsorted(uses[stage], steps)] for stage in stages])
    # Per stage and step, how many stages are used sooner. Both stages of an overlapped pair have the same next use, so
    # neither counts against the other and both may be gathered.
    sooner = (next_use[None, :, :] < next_use[:, None, :]).sum(axis=1)
    gathered = (sooner < ahead) & (next_use < end)
    edges = np.diff(gathered.astype(np.int8), axis=1, prepend=0, append=0)
    step, is_gather, stage = np.nonzero(np.stack((edges.T == -1, edges.T == 1), axis=1))
    # At one step first the drops, then the gathers, the stage that is used soonest first.
    urgency = np.where(is_gather, next_use[stage, np.minimum(step, len(steps) - 1)], 0)
    sequence = np.lexsort((urgency, is_gather, step))
    kind = np.where(is_gather, Kind.UNSHARD, Kind.RESHARD)
    return np.append(steps, end)[step][sequence], pack(kind, stages[stage])[sequence]
