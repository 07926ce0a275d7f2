"""A training that followed a plan: metrics of its steps, recorded traces and measured peaks."""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from penstock.errors import RunError
from penstock.ir.arguments import is_count, is_finite
from penstock.ir.notebook import html_table, timeline
from penstock.ir.plan import Plan, SavedRecord
from penstock.ir.trace import Trace
from penstock.ir.units import counted, seconds_text

_SHOWN_STEPS = 10


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one training step; a loss or norm that is NaN or Inf becomes None."""

    step: int
    """its number"""
    loss: float | None
    """the loss of the whole batch"""
    seconds: float
    """wall-clock time of the step"""
    samples: int
    """number of samples in the batch"""
    grad_norm: float | None = None
    """norm of all gradients, before they were clipped"""
    lr: float | None = None
    """learning rate of the first parameter group"""
    eval_loss: float | None = None
    """loss of the evaluation after this step, if there was one"""

    def __post_init__(self) -> None:
        for name in ("loss", "grad_norm", "lr", "eval_loss"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                object.__setattr__(self, name, None)
        if not (is_finite(self.seconds) and self.seconds >= 0):
            raise RunError("seconds must be finite, 0 or more", step=self.step, seconds=self.seconds)
        if self.samples < 0:
            raise RunError("samples must be 0 or more", step=self.step, samples=self.samples)


@dataclass(frozen=True)
class Run(SavedRecord):
    """A training: the plan it followed, its steps in order, recorded traces and measured peaks."""

    plan: Plan
    """the plan it followed"""
    steps: tuple[StepMetrics, ...]
    """metrics of the steps, in order"""
    traces: tuple[Trace, ...] = ()
    """recorded steps; views show the last one"""
    peaks: tuple[int, ...] = ()
    """measured peak bytes per rank; empty if not measured"""
    largest_difference: float | None = None
    """relative difference to the unsplit model, if it was compared"""
    versions: tuple[tuple[str, str], ...] = ()
    """versions of the software it ran with, by name"""
    batches_per_step: int = 1
    """batches of every step, over which gradients are accumulated; the plan is for one batch"""

    def __post_init__(self) -> None:
        # torch.__version__ is a subclass of str.
        versions = tuple((str(name), str(version)) for name, version in self.versions)
        object.__setattr__(self, "versions", versions)
        numbers = [metrics.step for metrics in self.steps]
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            raise RunError("the steps of a run must be in order", steps=numbers[:20])
        ranks = self.plan.num_ranks
        for trace in self.traces:
            if trace.num_ranks != ranks:
                raise RunError("a trace must have the ranks of the plan", ranks=trace.num_ranks, planned=ranks)
        if self.peaks and len(self.peaks) != ranks:
            raise RunError("peaks must have one entry per rank, or none", peaks=len(self.peaks), ranks=ranks)
        if any(peak < 0 for peak in self.peaks):
            raise RunError("peak bytes must be 0 or more", peaks=self.peaks)
        if not is_count(self.batches_per_step):
            raise RunError("batches_per_step must be a whole number, 1 or more", got=repr(self.batches_per_step))

    def __repr__(self) -> str:
        return f"Run({counted(len(self.steps), 'step')} of {self.plan!r})"

    def _repr_html_(self) -> str:
        rows = [
            (
                str(each.step),
                *("" if v is None else f"{v:.6g}" for v in (each.loss, each.grad_norm)),
                seconds_text(each.seconds),
            )
            for each in self.steps[-_SHOWN_STEPS:]
        ]
        recorded = "" if self.trace is None else timeline(self.trace)
        return self.plan._repr_html_() + html_table(("step", "loss", "gradient norm", "time"), rows) + recorded

    @property
    def trace(self) -> Trace | None:
        """The last recorded step, if there is one."""
        return self.traces[-1] if self.traces else None

    @property
    def step_seconds(self) -> float | None:
        """Median over the steps after the first, which includes warm-up; None without steps."""
        later = self.steps[1:] or self.steps
        return median(metrics.seconds for metrics in later) if later else None

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds of a step, with all of its batches."""
        return self.batches_per_step * self.plan.predicted.makespan

    @property
    def losses(self) -> tuple[float, ...]:
        """The finite losses, in order."""
        return tuple(metrics.loss for metrics in self.steps if metrics.loss is not None)
