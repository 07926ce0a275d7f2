"""Reduces the gradients of a stage over its replicas as soon as the last of them exists."""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Fact, Kind, Program, pack
from penstock.passes.base import Pass


@dataclass(frozen=True)
class AddReductions(Pass):
    """Reduce(stage) after the stage's last B or W and the messages that follow it."""

    name = "add_reductions"

    def __call__(self, program: Program) -> Program:
        table = program.table
        last = program.makers[Fact.WEIGHT_GRADIENT].max(axis=1)
        stage = np.flatnonzero(last >= 0)
        last = last[stage]
        # Messages that directly follow the last pass go first, because other ranks wait for them: the Reduce goes
        # before the next action of the rank that is not a message, or at the end of the rank.
        others = np.flatnonzero(~np.isin(table.kinds, (Kind.SEND, Kind.RECV)))
        ends = table.starts[table.rank_of[last] + 1]
        place = np.searchsorted(others, last + 1)
        following = others[np.minimum(place, len(others) - 1)]
        before = np.where(place < len(others), np.minimum(following, ends), ends).astype(np.int64)
        ranks = np.asarray(program.placement.ranks)[stage]
        return program.with_table(table.insert(before, ranks, pack(Kind.REDUCE, stage)))
