"""add_reductions: a stage's gradients are reduced over its replicas right after the last of them exists."""

from dataclasses import dataclass

import numpy as np

from penstock.ir import Codes, Fact, Kind, Makers, Program, pack
from penstock.passes.base import ProgramToProgram


@dataclass(frozen=True)
class AddReductions(ProgramToProgram):
    """Reduce(stage) after the stage's last B or W and the messages that follow it."""

    name = "add_reductions"

    def __call__(self, program: Program) -> Program:
        table = program.table
        makers = Makers(table.passes, program.num_stages, program.num_microbatches)
        last = makers[Fact.WEIGHT_GRADIENT].max(axis=1)
        stage = np.flatnonzero(last >= 0)
        ranks = np.asarray(program.placement.ranks)[stage]
        return program.with_table(table.insert(after_messages(program, last[stage]), ranks, pack(Kind.REDUCE, stage)))


def after_messages(program: Program, index: Codes) -> Codes:
    """The index after each action and the messages that directly follow it: what others wait for goes first."""
    table = program.table
    stops = np.flatnonzero(~np.isin(table.kinds, (Kind.SEND, Kind.RECV)))
    ends = table.starts[table.rank_of[index] + 1]
    place = np.searchsorted(stops, index + 1)
    following = stops[np.minimum(place, len(stops) - 1)]
    return np.where(place < len(stops), np.minimum(following, ends), ends).astype(np.int64)
