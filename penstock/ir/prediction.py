"""Prediction: what a step will take, in seconds and bytes, and what no order can undercut."""

import math
from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.ir.trace import Trace

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Prediction:
    """The summary of a predicted Trace; with this partition and placement no order is faster than `lower_bound`."""

    makespan: float
    bubble: float
    span: float
    span_bubble: float
    peaks: tuple[int, ...]
    """most bytes held, per rank"""
    lower_bound: float

    def __post_init__(self) -> None:
        for name in ("makespan", "span", "lower_bound"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{name.replace('_', ' ')} must be finite seconds, 0 or more", seconds=value)
        if max(self.span, self.lower_bound) > self.makespan * (1 + _TOLERANCE):
            raise PlanError(
                "neither span nor lower bound can exceed the makespan",
                span=self.span,
                lower_bound=self.lower_bound,
                makespan=self.makespan,
            )
        for share in (self.bubble, self.span_bubble):
            if not -_TOLERANCE <= share <= 1.0:
                raise PlanError("a bubble is a share between 0 and 1", bubble=share)
        if any(peak < 0 for peak in self.peaks):
            raise PlanError("peak bytes must be 0 or more", peaks=self.peaks)

    @classmethod
    def of(cls, trace: Trace, lower_bound: float) -> "Prediction":
        """The summary of a trace, with what was proven about every other order."""
        peaks = tuple(trace.peak_bytes(rank) for rank in range(trace.num_ranks))
        return cls(trace.makespan, trace.bubble, trace.span, trace.span_bubble, peaks, lower_bound)

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that the rank holds at any time."""
        if not 0 <= rank < len(self.peaks):
            raise PlanError("no such rank", rank=rank, ranks=len(self.peaks))
        return self.peaks[rank]
