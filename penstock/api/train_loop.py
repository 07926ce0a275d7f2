"""The training loop of `penstock train`: batches, steps, metrics, skipped steps and checkpoints."""

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

MAX_SKIPPED = 3  # consecutive skipped steps that end the training
_NUM_RECENT = 9  # steps whose traces are kept; the one of median length goes into the Run
_PAIR = "yield inputs, target"


class StepCall(NamedTuple):
    """The arguments of `Pipeline.step`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None


def step_call(batch: Any, has_loss_fn: bool) -> StepCall:
    """Convert a batch to the arguments of a step. With a loss function, a batch is a pair of inputs and target.

    Inputs are one tensor, a tuple of arguments, or a mapping from names to arguments.
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
            raise RunError("the names of a batch must be strings", got=names[:3])
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


def size_of(call: StepCall) -> tuple[int, int]:
    """The number of samples in a batch, and of tokens: 0 unless its first input is a 2-D integer tensor."""
    tensors = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        return 0, 0
    first = tensors[0]
    is_text = first.dim() == 2 and not (first.is_floating_point() or first.is_complex())
    return len(first), first.numel() if is_text else 0


@dataclass(frozen=True)
class LoopOptions:
    """Options of the training loop."""

    steps: int | None = None
    """number of steps; None: until the batches end"""
    clip: float | None = None
    """maximum gradient norm"""
    has_loss_fn: bool = False
    """whether a batch is a pair of inputs and target"""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise RunError("steps must be 1 or more", got=self.steps)
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise RunError("clip must be finite and above 0", got=self.clip)

    def num_left(self, num_taken: int) -> int | None:
        """Steps left after `num_taken`; None: until the batches end."""
        return None if self.steps is None else max(0, self.steps - num_taken)


class StepReport(NamedTuple):
    """One training step, for the log."""

    metrics: StepMetrics
    num_steps: int | None
    """total number of steps, if it is known"""
    tokens: int
    """0 if the batch has no tokens"""
    pipeline_seconds: float
    """from the first to the last action of the step; the plan predicts this time"""
    slowest: tuple[int, float]
    """the stage with the longest compute time, and its seconds"""
    memory: int
    """peak bytes of the largest process"""
    eta_seconds: float | None
    skipped: str = ""
    """why the step was skipped; empty if it was not"""
    notes: tuple[str, ...] = ()
    """messages for the user"""


OnStep = Callable[[StepReport], None]


def train(
    pipe: Pipeline,
    batches: Batches,
    optimizer: Any,
    options: LoopOptions,
    on_step: OnStep,
    saver: PeriodicSaver | None = None,
) -> Run:
    """Train until batches or steps end or a stop is requested on any rank; all ranks stop after the same step.

    The first rank calls `on_step` after every step. With `RunOptions(nonfinite="skip")`, steps with NaN or Inf are
    skipped, and several in a row raise. With a `saver`, checkpoints are written regularly and at the end, and the Run
    has the steps since the checkpoint that training resumed from.
    """
    with catch_stop_signals() as stop:
        left, note = (batches_from(batches, 0), "") if saver is None else saver.resume(batches)
        num_before = pipe.num_steps
        log = _Log(pipe.plan, 0 if saver is None else saver.num_skipped)
        for batch in islice(left, options.num_left(num_before)):
            call = step_call(batch, options.has_loss_fn)
            outcome, problem = _retry_after_save(partial(_step, pipe, call, optimizer, options.clip), saver)
            log.add(outcome)
            stop_requested, memory = pipe.largest(float(bool(stop)), float(_bytes_held()))
            notes = (note, problem, "" if saver is None else saver.step_taken(outcome.metrics, log.num_skipped))
            if pipe.is_first:
                notes = (*notes, log.slow_ranks())
                on_step(_report(log.steps, options.steps, call, outcome, int(memory), notes))
            note = ""
            log.check()
            if stop_requested:
                break
        if not pipe.num_steps:
            raise RunError("the data has no batches", hint="a data function that yields at least one")
        if saver is not None:
            saver.finish()
    versions = (("python", platform.python_version()), ("torch", str(torch.__version__)))
    return Run(pipe.plan, tuple(log.steps), log.median_trace, versions=versions)


class _Log:
    """The steps of a run so far."""

    def __init__(self, plan: Plan, num_skipped: int) -> None:
        self.steps: list[StepMetrics] = []
        self.num_skipped = num_skipped
        """consecutive skipped steps"""
        self._advisor = SlowRankAdvisor(plan)
        self._recent: deque[Trace] = deque(maxlen=_NUM_RECENT)
        self._skipped = ""

    def add(self, outcome: "_StepOutcome") -> None:
        """Append a step."""
        self.steps.append(outcome.metrics)
        if outcome.trace is not None:
            self._recent.append(outcome.trace)
        self._skipped = outcome.skipped
        self.num_skipped = self.num_skipped + 1 if outcome.skipped else 0

    def slow_ranks(self) -> str:
        """A message if the last steps show a slow rank, else empty."""
        return self._advisor.observe(self.steps[-1].step + 1, self._recent[-1]) if self._recent else ""

    def check(self) -> None:
        """Raise after too many consecutive skipped steps."""
        if self.num_skipped >= MAX_SKIPPED:
            hint = "a lower learning rate, clipping, an earlier checkpoint, or inspect the batch"
            error = RunError(f"{self.num_skipped} steps in a row: {self._skipped}", hint=hint)
            error.is_final = True  # a restart would fail the same way
            raise error

    @property
    def median_trace(self) -> tuple[Trace, ...]:
        """The trace of median length among recent steps; the last one may be unusual."""
        return tuple(sorted(self._recent, key=lambda trace: trace.makespan)[len(self._recent) // 2 :][:1])


class _StepOutcome(NamedTuple):
    """Metrics and trace of one step, and why it was skipped if it was."""

    metrics: StepMetrics
    trace: Trace | None
    skipped: str


def _retry_after_save(run_step: Callable[[], _StepOutcome], saver: PeriodicSaver | None) -> tuple[_StepOutcome, str]:
    """Run a step. If it failed only because the previous asynchronous save failed, repeat it and return a message."""
    try:
        return run_step(), ""
    except (CheckpointError, RunError) as error:
        if saver is None:
            raise
        message = saver.step_refused(error)
    return run_step(), message


def _step(pipe: Pipeline, call: StepCall, optimizer: Any, clip: float | None) -> _StepOutcome:
    began, number = time.perf_counter(), pipe.num_steps
    optimizer.zero_grad()
    with warnings.catch_warnings():
        # A skipped step is reported in its log line.
        warnings.filterwarnings("ignore", "a loss or gradient is not a finite number", PenstockWarning)
        result = pipe.step(*call.args, target=call.target, record=True, **call.kwargs)
    assert result.loss is not None  # step raises without a loss
    norm = None
    if not result.skipped:
        norm = float(pipe.clip_grad_norm_(math.inf if clip is None else clip))
        optimizer.step()
    seconds = time.perf_counter() - began
    metrics = StepMetrics(number, float(result.loss), seconds, size_of(call)[0], norm)
    return _StepOutcome(metrics, result.trace, result.skipped.partition("\n")[0])


def _report(
    steps: list[StepMetrics],
    num_steps: int | None,
    call: StepCall,
    outcome: _StepOutcome,
    memory: int,
    notes: Sequence[str],
) -> StepReport:
    # The first step also records the model and warms caches, so it is not representative.
    usual = statistics.median(metrics.seconds for metrics in steps[1:] or steps)
    eta = None if num_steps is None else (num_steps - steps[-1].step - 1) * usual
    trace = outcome.trace
    makespan = 0.0 if trace is None else trace.makespan
    shown = tuple(note for note in notes if note)
    tokens = size_of(call)[1]
    return StepReport(steps[-1], num_steps, tokens, makespan, _slowest(trace), memory, eta, outcome.skipped, shown)


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
