"""Marks where all tensors that a stage holds for a microbatch can be freed."""

from dataclasses import dataclass

import numpy as np

from penstock.ir import PASS_KINDS, Kind, Program, pack
from penstock.passes.base import Pass

_USERS = (*PASS_KINDS, Kind.SEND)


@dataclass(frozen=True)
class AddFrees(Pass):
    """Free(stage, microbatch) after its last pass and its last Send."""

    name = "add_frees"

    def __call__(self, program: Program) -> Program:
        passes = program.table.passes
        uses = np.isin(passes.kind, _USERS)
        last = np.full((program.num_stages, program.num_microbatches), -1, dtype=np.int64)
        np.maximum.at(last, (passes.stage[uses], passes.microbatch[uses]), passes.index[uses])
        stage, microbatch = np.nonzero(last >= 0)
        ranks = np.asarray(program.placement.ranks)[stage]
        return program.with_table(
            program.table.insert(last[stage, microbatch] + 1, ranks, pack(Kind.FREE, stage, microbatch))
        )
