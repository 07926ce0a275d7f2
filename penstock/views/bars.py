"""The passes of a trace as the bars of a timeline: arrays of their ranks, starts, ends, colours and texts."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.ir import COMPUTE_KINDS, Floats, Ints, Kind, Passes, Trace

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
ROUNDING = 1e-6
"""share of a step of time below which two times count as equal"""


@dataclass(frozen=True)
class Bars:
    """One row per bar, in the order of the program; an overlapped pair makes two bars of half the height."""

    trace: Trace
    passes: Passes
    half: Ints
    """WHOLE, or UPPER for the forward and LOWER for the backward of an overlapped pair"""

    @classmethod
    def of(cls, trace: Trace) -> "Bars":
        """All passes of a trace, and those of its other stage actions that took time."""
        table = trace.program.table
        found = table.passes
        took_time = trace.durations[found.index] > 0
        shown = np.isin(found.kind, COMPUTE_KINDS)
        shown |= np.isin(found.kind, (Kind.REDUCE, Kind.UNSHARD, Kind.RESHARD)) & took_time
        is_pair = table.kinds[found.index] == Kind.OVERLAP
        half = np.where(is_pair, np.where(found.kind == Kind.FORWARD, UPPER, LOWER), WHOLE)
        sequence = np.lexsort((half[shown], found.index[shown]))
        return cls(trace, Passes(*(column[shown][sequence] for column in found)), half[shown][sequence])

    def __len__(self) -> int:
        return len(self.half)

    @cached_property
    def rank(self) -> Ints:
        """The rank of each bar."""
        return self.trace.program.table.rank_of[self.passes.index]

    @cached_property
    def start(self) -> Floats:
        """The start of each bar, in seconds."""
        return self.trace.starts.values[self.passes.index]

    @cached_property
    def end(self) -> Floats:
        """The end of each bar, in seconds."""
        return self.trace.ends.values[self.passes.index]

    @cached_property
    def chunk_of_stage(self) -> Ints:
        """The position of each stage among the stages of its rank: 0 for the first."""
        chunk = np.zeros(self.trace.program.num_stages, dtype=np.int64)
        for stages in self.trace.program.placement.stages:
            chunk[list(stages)] = range(len(stages))
        return chunk

    @cached_property
    def chunk(self) -> Ints:
        """The position of each bar's stage among the stages of its rank."""
        return self.chunk_of_stage[self.passes.stage]

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
        """The kinds that occur, in the order of the legend."""
        return tuple(kind for kind in LETTERS if (self.passes.kind == kind).any())

    @cached_property
    def short_labels(self) -> tuple[str, ...]:
        """Kind and microbatch of each bar: `F3`."""
        columns = zip(self.passes.kind.tolist(), self.passes.microbatch.tolist(), strict=True)
        return tuple(
            f"{LETTERS[Kind(kind)]}{microbatch}" if kind in COMPUTE_KINDS else LETTERS[Kind(kind)]
            for kind, microbatch in columns
        )

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The short label, with the stage before it where a rank holds several: `4F3`."""
        if self.num_chunks == 1:
            return self.short_labels
        stages = self.passes.stage.tolist()
        return tuple(f"{stage}{label}" for stage, label in zip(stages, self.short_labels, strict=True))

    def coverage(self, step: float, columns: int) -> tuple[Ints, Ints, Ints, Floats]:
        """How bars fill equal steps of time: per bar and step that it touches, four columns.

        These are the bar, its row (2r for rank r, 2r + 1 for the lower bars of its pairs), the step, and the
        seconds of the step that the bar fills.
        """
        # A recorded clock may run a little ahead of the start of the step.
        first = np.maximum(np.floor(self.start / step + ROUNDING).astype(np.int64), 0)
        last = np.minimum(np.ceil(self.end / step - ROUNDING).astype(np.int64), columns)
        counts = np.maximum(last - first, 0)
        owner = np.repeat(np.arange(len(self), dtype=np.int64), counts)
        column = np.arange(len(owner), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts) + first[owner]
        filled = np.minimum(self.end[owner], (column + 1) * step) - np.maximum(self.start[owner], column * step)
        return owner, 2 * self.rank[owner] + (self.half[owner] == LOWER), column, filled
