"""Batches: what a data function hands out, as the arguments of a step."""

import math
import platform
import resource
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.api.pipeline import Pipeline
from penstock.checkpoint import Batches, PeriodicSaver, batches_from
from penstock.errors import CheckpointError, PenstockWarning, RunError
from penstock.ir import Plan, Run, StepMetrics, Trace
from penstock.launch import catch_stop_signals
from penstock.planner import SlowRankAdvisor

_PAIR = "yield inputs, target"


class StepCall(NamedTuple):
    """What a step is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None


def step_call(batch: Any, has_loss_fn: bool) -> StepCall:
    """A batch in any usual form: with a loss function (inputs, target), else the inputs alone.

    Inputs are one tensor, a tuple of arguments, or a mapping of arguments by name.
    """
    if not has_loss_fn:
        return StepCall(*_inputs(batch))
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | list) else type(batch).__name__
        raise RunError("a loss function needs batches of inputs and a target", batch=got, hint=_PAIR)
    inputs, target = batch
    return StepCall(*_inputs(inputs), target)


def _inputs(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        if names := [key for key in given if not isinstance(key, str)]:
            raise RunError("a batch by name needs names that are text", names=names[:3])
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


def size_of(call: StepCall) -> tuple[int, int]:
    """The samples of a batch, and its tokens: 0 where its inputs are not whole numbers in rows."""
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        return 0, 0
    first = tensors[0]
    is_text = first.dim() == 2 and not (first.is_floating_point() or first.is_complex())
    return len(first), first.numel() if is_text else 0


_RECENT = 9
"""steps of which one is shown"""
MOST_SKIPPED = 3
"""steps in a row that may be left out"""


@dataclass(frozen=True)
class Recipe:
    """How a pipeline is trained."""

    steps: int | None = None
    """how many steps to take; None: as many as there are batches"""
    clip: float | None = None
    """the norm that gradients are scaled down to"""
    has_loss_fn: bool = False
    """whether batches are inputs and a target"""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise RunError("steps is a whole number above 0", steps=self.steps)
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise RunError("clip is a norm above 0", clip=self.clip)

    def num_left(self, num_taken: int) -> int | None:
        """How many steps are left after so many; None for as many as there are batches."""
        return None if self.steps is None else max(0, self.steps - num_taken)


class StepReport(NamedTuple):
    """One step as it is told while training goes on."""

    metrics: StepMetrics
    of: int | None
    """how many steps there will be, where that is known"""
    tokens: int
    """0 where the batch is not one of tokens"""
    pipeline_seconds: float
    """from the first action of the step to its last, which is what a plan predicts"""
    slowest: tuple[int, float]
    """the stage that took longest, and its seconds"""
    memory: int
    """bytes that the largest process holds"""
    eta_seconds: float | None
    skipped: str = ""
    """why the step was left out; empty if it was not"""
    notes: tuple[str, ...] = ()
    """what else is worth knowing"""


Tell = Callable[[StepReport], None]


def train(
    pipe: Pipeline, batches: Batches, optimizer: Any, recipe: Recipe, tell: Tell, saver: PeriodicSaver | None = None
) -> Run:
    """Train until batches or steps end, or a rank is asked to stop; then all ranks stop after the same step.

    The first rank tells every step. One whose numbers are not finite is left out, if the options of the pipeline say
    so; several in a row end it. With a `saver`, checkpoints are written on the way and at the end, and the Run has the
    steps since the one that it went on from.
    """
    with catch_stop_signals() as wish:
        left, note = (batches_from(batches, 0), "") if saver is None else saver.resume(batches)
        num_before = pipe.num_steps
        log = _Log(pipe.plan, 0 if saver is None else saver.num_skipped)
        for batch in islice(left, recipe.num_left(num_before)):
            call = step_call(batch, recipe.has_loss_fn)
            taken, problem = _tried(partial(_step, pipe, call, optimizer, recipe.clip), saver)
            log.add(taken)
            wants_to_stop, memory = pipe.largest(float(bool(wish)), float(_bytes_held()))
            notes = (note, problem, "" if saver is None else saver.step_taken(taken.metrics, log.num_skipped))
            if pipe.is_first:
                notes = (*notes, log.slow_ranks())
                tell(_report(log.steps, recipe.steps, call, taken, int(memory), notes))
            note = ""
            log.check()
            if wants_to_stop:
                break
        if not pipe.num_steps:
            raise RunError("there are no batches to train on", hint="a data function that yields at least one")
        if saver is not None:
            saver.finish()
    return Run(pipe.plan, tuple(log.steps), log.usual, versions=_versions())


class _Log:
    """What a training has come to."""

    def __init__(self, plan: Plan, num_skipped: int) -> None:
        self.steps: list[StepMetrics] = []
        self.num_skipped = num_skipped
        """steps in a row that were left out"""
        self._advisor = SlowRankAdvisor(plan)
        self._recent: deque[Trace] = deque(maxlen=_RECENT)
        self._skipped = ""

    def add(self, taken: "_Taken") -> None:
        """One more step."""
        self.steps.append(taken.metrics)
        if taken.trace is not None:
            self._recent.append(taken.trace)
        self._skipped = taken.skipped
        self.num_skipped = self.num_skipped + 1 if taken.skipped else 0

    def slow_ranks(self) -> str:
        """A remark, if the last step shows a rank to be slow."""
        return self._advisor.observe(self.steps[-1].step + 1, self._recent[-1]) if self._recent else ""

    def check(self) -> None:
        """Refuse to go on after too many steps in a row that were left out."""
        if self.num_skipped >= MOST_SKIPPED:
            hint = "a lower learning rate, clipping, an earlier checkpoint, or a look at the batch"
            error = RunError(f"{self.num_skipped} steps in a row: {self._skipped}", hint=hint)
            error.is_final = True  # it would come to the same
            raise error

    @property
    def usual(self) -> tuple[Trace, ...]:
        """The recorded step of middle length: the last one may have been unusual."""
        return tuple(sorted(self._recent, key=lambda trace: trace.makespan)[len(self._recent) // 2 :][:1])


class _Taken(NamedTuple):
    """A step that was taken."""

    metrics: StepMetrics
    trace: Trace | None
    skipped: str


def _tried(take: Callable[[], _Taken], saver: PeriodicSaver | None) -> tuple[_Taken, str]:
    """A step; one that only says that the checkpoint before could not be written is taken again, with a remark."""
    try:
        return take(), ""
    except (CheckpointError, RunError) as error:
        if saver is None:
            raise
        remark = saver.step_refused(error)
    return take(), remark


def _step(pipe: Pipeline, call: StepCall, optimizer: Any, clip: float | None) -> _Taken:
    began, number = time.perf_counter(), pipe.num_steps
    optimizer.zero_grad()
    with warnings.catch_warnings():
        # A step that is left out is told in its line.
        warnings.filterwarnings("ignore", "a loss or gradient is not a finite number", PenstockWarning)
        result = pipe.step(*call.args, target=call.target, record=True, **call.kwargs)
    assert result.loss is not None  # a step without one is refused
    norm = None
    if not result.skipped:
        norm = float(pipe.clip_grad_norm_(math.inf if clip is None else clip))
        optimizer.step()
    seconds = time.perf_counter() - began
    metrics = StepMetrics(number, float(result.loss), seconds, size_of(call)[0], norm)
    return _Taken(metrics, result.trace, result.skipped.partition("\n")[0])


def _report(
    steps: list[StepMetrics], of: int | None, call: StepCall, taken: _Taken, memory: int, notes: Sequence[str]
) -> StepReport:
    # The first step also records the model and warms caches: it says nothing of the others.
    usual = statistics.median(metrics.seconds for metrics in steps[1:] or steps)
    eta = None if of is None else (of - steps[-1].step - 1) * usual
    trace = taken.trace
    makespan = 0.0 if trace is None else trace.makespan
    shown = tuple(note for note in notes if note)
    return StepReport(steps[-1], of, size_of(call)[1], makespan, _slowest(trace), memory, eta, taken.skipped, shown)


def _slowest(trace: Trace | None) -> tuple[int, float]:
    """The stage whose passes took longest together."""
    seconds = () if trace is None else trace.stage_seconds
    return max(enumerate(seconds), key=lambda item: item[1], default=(0, 0.0))


def _bytes_held() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _versions() -> tuple[tuple[str, str], ...]:
    return (("python", platform.python_version()), ("torch", str(torch.__version__)))
