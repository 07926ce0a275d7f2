"""Run: what a training by a plan came to, step by step, with what was recorded and measured on the way."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from penstock.errors import RunError
from penstock.ir.figures import is_finite
from penstock.ir.plan import Plan
from penstock.ir.trace import Trace


@dataclass(frozen=True)
class StepMetrics:
    """One training step; a loss or norm that was no finite number is None."""

    step: int
    loss: float | None
    seconds: float
    samples: int
    grad_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("loss", "grad_norm"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                object.__setattr__(self, name, None)
        if not (is_finite(self.seconds) and self.seconds >= 0):
            raise RunError("a step takes finite seconds, 0 or more", step=self.step, seconds=self.seconds)
        if self.samples < 0:
            raise RunError("a step has 0 samples or more", step=self.step, samples=self.samples)


StepFigures = StepMetrics
"""the earlier public name"""


@dataclass(frozen=True)
class Run:
    """A training: the plan it followed, its steps in order, and what was found out about it."""

    plan: Plan
    steps: tuple[StepMetrics, ...]
    traces: tuple[Trace, ...] = ()
    """recorded steps, the last one is shown"""
    peaks: tuple[int, ...] = ()
    """most bytes that each rank held, measured; empty where unknown"""
    largest_difference: float | None = None
    """against the unsplit model, relative, if it was compared"""
    versions: tuple[tuple[str, str], ...] = ()
    """of what it ran with, by name"""

    def __post_init__(self) -> None:
        # torch says its version in a class of its own.
        versions = tuple((str(name), str(version)) for name, version in self.versions)
        object.__setattr__(self, "versions", versions)
        numbers = [figures.step for figures in self.steps]
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            raise RunError("the steps of a run must be in order", steps=numbers[:20])
        ranks = self.plan.num_ranks
        for trace in self.traces:
            if trace.num_ranks != ranks:
                raise RunError("a trace has other ranks than the plan", ranks=trace.num_ranks, planned=ranks)
        if self.peaks and len(self.peaks) != ranks:
            raise RunError("one peak per rank is needed, or none", peaks=len(self.peaks), ranks=ranks)
        if any(peak < 0 for peak in self.peaks):
            raise RunError("peak bytes must be 0 or more", peaks=self.peaks)

    @property
    def trace(self) -> Trace | None:
        """The step that was recorded last, if any was."""
        return self.traces[-1] if self.traces else None

    @property
    def step_seconds(self) -> float | None:
        """The median of the steps after the first, which also warms up; None without steps."""
        later = self.steps[1:] or self.steps
        return median(figures.seconds for figures in later) if later else None

    @property
    def losses(self) -> tuple[float, ...]:
        """Those that were finite numbers, in order."""
        return tuple(figures.loss for figures in self.steps if figures.loss is not None)

    def save(self, path: str | Path) -> None:
        """Write the run as JSON."""
        # The codec lists every noun, this one too, so it cannot be imported above.
        from penstock.ir.codec import save_record

        save_record(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Run":
        """Read a run that `save` wrote."""
        from penstock.ir.codec import load_record

        return load_record(path, cls)
