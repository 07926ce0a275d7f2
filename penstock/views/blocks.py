"""Blocks: what a trace has to show of every rank, as columns: the passes, and the stage actions that took time."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.ir import COMPUTE_KINDS, Kind, Passes, Trace

LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.INPUT_GRAD: "I",
    Kind.WEIGHT_GRAD: "W",
    Kind.REDUCE: "R",
    Kind.UNSHARD: "U",
    Kind.RESHARD: "S",
}
WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.REDUCE: "reduce",
    Kind.UNSHARD: "unshard",
    Kind.RESHARD: "reshard",
}
WHOLE, UPPER, LOWER = 0, 1, 2


@dataclass(frozen=True)
class Blocks:
    """One row per block, in the order of the program; an overlapped pair makes two that share a rank's height."""

    trace: Trace
    passes: Passes
    half: NDArray[np.int64]
    """WHOLE, or UPPER for the forward and LOWER for the backward of an overlapped pair"""

    @classmethod
    def of(cls, trace: Trace) -> "Blocks":
        """The blocks of a trace."""
        table = trace.program.table
        found = table.passes
        took_time = (trace.ends.values > trace.starts.values)[found.index]
        shown = np.isin(found.kind, COMPUTE_KINDS)
        shown |= np.isin(found.kind, (Kind.REDUCE, Kind.UNSHARD, Kind.RESHARD)) & took_time
        is_pair = table.kinds[found.index] == Kind.OVERLAP
        half = np.where(is_pair, np.where(found.kind == Kind.FORWARD, UPPER, LOWER), WHOLE)
        sequence = np.lexsort((half[shown], found.index[shown]))
        return cls(trace, Passes(*(column[shown][sequence] for column in found)), half[shown][sequence])

    def __len__(self) -> int:
        return len(self.half)

    @cached_property
    def rank(self) -> NDArray[np.int64]:
        """The rank of each block."""
        return self.trace.program.table.rank_of[self.passes.index]

    @cached_property
    def start(self) -> NDArray[np.float64]:
        """When each block starts."""
        return self.trace.starts.values[self.passes.index]

    @cached_property
    def end(self) -> NDArray[np.float64]:
        """When each block ends."""
        return self.trace.ends.values[self.passes.index]

    @cached_property
    def chunk(self) -> NDArray[np.int64]:
        """Whether the stage of each block is the first (0), second ... of its rank."""
        stages = self.trace.program.placement.stages
        place = np.zeros(self.trace.program.num_stages, dtype=np.int64)
        for held in stages:
            place[list(held)] = range(len(held))
        return place[self.passes.stage]

    @property
    def num_chunks(self) -> int:
        """The most stages that one rank holds."""
        return max(map(len, self.trace.program.placement.stages))

    @property
    def has_pairs(self) -> bool:
        """Whether any two passes overlap."""
        return bool((self.half != WHOLE).any())

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that occur, in the order in which a legend names them."""
        return tuple(kind for kind in LETTERS if (self.passes.kind == kind).any())

    @cached_property
    def short_labels(self) -> tuple[str, ...]:
        """Kind and microbatch of each block: `F3`."""
        columns = (self.passes.kind.tolist(), self.passes.microbatch.tolist())
        return tuple(_letter(kind, microbatch) for kind, microbatch in zip(*columns, strict=True))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The short label, with the stage before it where a rank holds several: `4F3`."""
        if self.num_chunks == 1:
            return self.short_labels
        stages = self.passes.stage.tolist()
        return tuple(f"{stage}{label}" for stage, label in zip(stages, self.short_labels, strict=True))


def _letter(kind: int, microbatch: int) -> str:
    letter = LETTERS[Kind(kind)]
    return f"{letter}{microbatch}" if kind in COMPUTE_KINDS else letter
