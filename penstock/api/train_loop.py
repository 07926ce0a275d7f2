"""penstock.fit, the training loop behind `penstock train`: batches, steps, metrics, evaluation and checkpoints."""

import math
import platform
import resource
import statistics
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.api.pipeline import Pipeline
from penstock.api.step_logs import StepLogs
from penstock.api.train_options import TrainOptions
from penstock.batches import Batch, Microbatch
from penstock.capture import GeneratorStates, is_inexact
from penstock.checkpoint import Batches, CheckpointDir, CheckpointOptions, FitProgress, PeriodicSaver, batches_from
from penstock.errors import CheckpointError, PenstockWarning, RunError
from penstock.ir import Plan, Run, StepMetrics, Trace, named_leaves
from penstock.launch import StopRequest, catch_stop_signals
from penstock.planner import SlowRankAdvisor
from penstock.runtime import checksum

MAX_SKIPPED = 3  # consecutive skipped steps that end the training
_NUM_RECENT = 9  # steps whose traces are kept; the one of median length goes into the Run
_CHECK_SHARES_EVERY = 100  # steps between comparisons of the batches of replicas
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PAIR = "yield inputs, target"
_AUTO = "auto"


def step_batch(given: Any, has_loss_fn: bool) -> Batch:
    """Convert a batch of the user's data. With a loss function, it must be a pair of inputs and target.

    Inputs are one tensor, a tuple of arguments, or a mapping from names to arguments.
    """
    if not has_loss_fn:
        return Batch(*_inputs(given))
    if not isinstance(given, tuple | list) or len(given) != 2:
        got = f"{type(given).__name__} of {len(given)}" if isinstance(given, tuple | list) else type(given).__name__
        raise RunError("a loss function needs batches of inputs and a target", batch=got, hint=_PAIR)
    inputs, target = given
    return Batch(*_inputs(inputs), target)


def _inputs(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(given, Mapping):
        if names := [key for key in given if not isinstance(key, str)]:
            raise RunError("the names of a batch must be strings", got=names[:3])
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


def size_of(batch: Batch) -> tuple[int, int]:
    """The number of samples in a batch, and of tokens: 0 unless its first input is a 2-D integer tensor."""
    tensors = [value for value in (*batch.args, *batch.kwargs.values()) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        return 0, 0
    first = tensors[0]
    is_text = first.dim() == 2 and not is_inexact(first)
    return len(first), first.numel() if is_text else 0


def autocast(precision: str, device_type: str) -> AbstractContextManager[Any]:
    """The context in which a forward computes in a precision of TrainOptions."""
    dtype = _DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


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


@dataclass(frozen=True)
class TrainEvent:
    """A point in the training loop, given to callbacks on every rank."""

    name: str
    """"before_step", "after_step" (the weights are updated), "eval" (the evaluation after a step is done), "save" (a
    checkpoint is written, or with asynchronous checkpoints, being written) or "end" (of the training)"""
    step: int
    """number of the step, from 0; at "end" the number of steps taken"""
    pipe: Pipeline
    """the Pipeline; its collective calls, such as `full_state_dict`, must be made on every rank"""
    optimizer: Any
    """the optimizer of this rank"""
    metrics: StepMetrics | None
    """those of the last step, with `eval_loss` from "eval" on; None before the first step of the call"""
    path: Path | None
    """directory of the checkpoint, at "save\""""
    stop: Callable[[], None]
    """ends the training after this step, on all ranks if called on any"""


OnStep = Callable[[StepReport], None]
Callback = Callable[[TrainEvent], object]


def fit(
    pipe: Pipeline,
    batches: Batches,
    optimizer: Any,
    options: TrainOptions = TrainOptions(),  # noqa: B008
    *,
    eval_batches: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: CheckpointOptions | PeriodicSaver | None = None,
    on_step: OnStep | None = None,
    run_id: str | None = None,
) -> Run:
    """Train until batches or steps end or a stop is requested on any rank. Every rank makes the same call.

    The loop of `penstock train`. SIGINT and SIGTERM end the training after the current step, the same on all ranks.
    With `RunOptions(nonfinite="skip")`, steps with NaN or Inf are skipped, and several in a row raise.

    Args:
        pipe: the pipeline to train
        batches: all batches in order, or a function that returns those from a given index on; the same on every rank.
            With a `loss_fn` a batch is a pair of inputs and target, else the inputs: a tensor, a tuple of arguments, or
            a mapping from names to arguments. Replicas take their shares of the samples of every batch.
        optimizer: the optimizer of `pipe.parameters()`
        options: steps, clipping, accumulation, precision, learning rate, evaluation and logs
        eval_batches: batches to evaluate, or a function that returns them; the result is the mean of their losses, each
            weighted by its number of samples
        callbacks: functions that are called with a TrainEvent, on every rank
        checkpoints: where and how often to save, and what to resume from; `resume="auto"` resumes from the newest
            checkpoint of the directory, if there is one
        on_step: is called with a StepReport after every step, on the first rank
        run_id: id of the run in wandb; default: random, or that of the checkpoint

    Returns:
        The Run, with the steps since the checkpoint that training resumed from.

    Raises:
        RunError: if a step fails, several steps in a row are skipped, or there are no batches
        CheckpointError: if a checkpoint cannot be loaded, or the last one cannot be written
    """
    if pipe.optimizer is not None:
        raise RunError("fit does not train an asynchronous pipeline", hint="a loop of pipe.step and pipe.drain")
    if options.precision == "fp16" and pipe.scaler is None:
        raise RunError("precision fp16 needs a scaler", hint="Pipeline(..., scaler=penstock.GradScaler())")
    if eval_batches is None and options.eval_every is not None:
        raise RunError("eval_every needs batches to evaluate", hint="eval_batches=..., or --eval-data FILE.py:FUNCTION")
    if isinstance(eval_batches, Iterator):
        hint = "a list, a DataLoader, or a function that returns the batches"
        raise RunError("eval_batches must give the same batches every time, got an iterator", hint=hint)
    if isinstance(checkpoints, CheckpointOptions):
        if checkpoints.resume == _AUTO:
            has_any = CheckpointDir(checkpoints.directory).has_any
            checkpoints = replace(checkpoints, resume=checkpoints.directory if has_any else None)
        checkpoints = PeriodicSaver(pipe, optimizer, checkpoints)
    pipe.check_optimizer(optimizer)
    logs = StepLogs(options.log_targets if pipe.is_first else (), run_id)
    loop = _Loop(pipe, optimizer, options, eval_batches, tuple(callbacks), checkpoints, logs, on_step)
    try:
        run = loop.run(batches)
    except BaseException:
        # The steps before the error are in the logs. A log that cannot be closed must not hide the error.
        logs.close()
        raise
    for message in logs.close():
        warnings.warn(message, PenstockWarning, stacklevel=2)
    return run


class _Loop:
    """One call of `fit`."""

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: Any,
        options: TrainOptions,
        eval_batches: Any,
        callbacks: tuple[Callback, ...],
        saver: PeriodicSaver | None,
        logs: StepLogs,
        on_step: OnStep | None,
    ) -> None:
        self._pipe, self._optimizer, self._options = pipe, optimizer, options
        # Only if it is given: a model may have a parameter of this name.
        self._budget = {} if options.budget_tokens is None else {"budget_tokens": options.budget_tokens}
        self._eval_batches, self._callbacks, self._saver, self._on_step = eval_batches, callbacks, saver, on_step
        self._logs = logs
        self._messages: list[str] = []
        """for the report of the next step"""
        self._history = _StepHistory(pipe.plan)
        self._step = 0
        """number of steps taken"""
        self._stop_requested = False
        """whether a callback of this rank asked to stop"""
        self._was_signalled = False
        """whether any rank was asked to stop from outside"""
        self._metrics: StepMetrics | None = None
        self._is_evaluated = False
        """whether the last step was; its `eval_loss` does not show it, as a loss that is not finite is None there"""

    def run(self, batches: Batches) -> Run:
        pipe, options = self._pipe, self._options
        with catch_stop_signals() as stop:
            left = self._resume(batches)
            is_resumed = self._saver is not None and self._saver.step is not None
            if options.num_left(self._step) == 0 and not is_resumed:
                raise RunError(
                    "steps must be above the number of steps that the pipeline has taken",
                    steps=options.steps,
                    taken=self._step,
                    hint=f"steps={self._step + options.steps}, or a new Pipeline",
                )
            is_stopped = False
            while options.num_left(self._step) != 0 and not is_stopped:
                group = [step_batch(each, pipe.has_loss_fn) for each in islice(left, options.accumulate)]
                if not group:
                    break
                is_stopped = self._take_step(group, stop)
            if self._metrics is None and not is_resumed:
                raise RunError("the data has no batches", hint="a data function that yields at least one")
            # If data or a callback ended the training between two evaluations; after a signal there is no time.
            if self._metrics is not None and not self._is_evaluated and not self._was_signalled:
                self._evaluate(self._metrics)
            if self._saver is not None:
                self._saver.finish()
            self._emit("end")
        versions = (("python", platform.python_version()), ("torch", str(torch.__version__)))
        return Run(
            pipe.plan,
            tuple(self._history.steps),
            self._history.median_trace,
            versions=versions,
            batches_per_step=options.accumulate,
        )

    def _resume(self, batches: Batches) -> Iterator[Any]:
        """Restore the training if asked to; returns the remaining batches."""
        saver = self._saver
        # A step may have taken fewer calls of pipe.step than `accumulate`: a skipped one, or the last of the data.
        known, num_steps = self._pipe._fit_progress, self._pipe.num_steps
        if num_steps < known.pipeline_steps:  # the user has set `pipe.num_steps`
            known = FitProgress()
        self._step = known.steps + (num_steps - known.pipeline_steps) // self._options.accumulate
        if saver is None:
            left = batches_from(batches, 0)
        else:
            saver.on_save = lambda path: self._emit("save", path)
            saver.run_id = self._logs.run_id
            left, message = saver.resume(batches)
            self._messages.append(message)
            self._history.num_skipped, self._logs.run_id = saver.num_skipped, saver.run_id
            self._step = self._step if saver.step is None else saver.step
        self._pipe._fit_progress = FitProgress(self._step, self._pipe.num_steps)
        if self._options.changes_lr:
            for group in self._optimizer.param_groups:
                group.setdefault("initial_lr", float(group["lr"]))
        return left

    def _take_step(self, group: list[Batch], stop: StopRequest) -> bool:
        """Take a step, evaluate, log and save; returns whether all ranks stop now."""
        pipe, options, saver = self._pipe, self._options, self._saver
        self._emit("before_step")
        self._set_lr()
        outcome = self._retry_after_save(group)
        self._step += 1
        pipe._fit_progress = FitProgress(self._step, pipe.num_steps)
        self._metrics, self._is_evaluated = outcome.metrics, False
        self._history.add(outcome)
        self._write_metrics(outcome.metrics)
        self._emit("after_step")
        if self._step == options.steps or (options.eval_every is not None and self._step % options.eval_every == 0):
            self._evaluate(outcome.metrics)
        if saver is not None:
            self._messages.append(saver.step_taken(outcome.metrics, self._history.num_skipped, len(group)))
        signalled, stopped, memory = pipe.largest(bool(stop), self._stop_requested, _peak_bytes(pipe.device))
        self._was_signalled = bool(signalled)
        if pipe.is_first:
            self._messages.append(self._history.slow_ranks())
            if self._on_step is not None:
                tokens = sum(size_of(batch)[1] for batch in group)
                report = _step_report(self._history.steps, options.steps, tokens, outcome, int(memory), self._messages)
                self._on_step(report)
        self._messages.clear()
        self._history.check()
        return bool(signalled or stopped)

    def _set_lr(self) -> None:
        """Set the learning rates of this step, if they follow a schedule."""
        if not self._options.changes_lr:
            return
        factor = self._options.lr_factor(self._step)
        for group in self._optimizer.param_groups:
            rate = group["initial_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _retry_after_save(self, group: list[Batch]) -> "_StepOutcome":
        """Run a step. If it failed only because the previous asynchronous save failed, repeat it."""
        number = self._pipe.num_steps
        try:
            return self._run_step(group)
        except (CheckpointError, RunError) as error:
            if self._saver is None:
                raise
            self._messages.append(self._saver.step_refused(error))
        self._pipe.num_steps = number
        return self._run_step(group)

    def _run_step(self, group: list[Batch]) -> "_StepOutcome":
        """Forward and backward of the batches of a step, and the update."""
        pipe, optimizer, scaler, began = self._pipe, self._optimizer, self._pipe.scaler, time.perf_counter()
        optimizer.zero_grad()
        options = {"scale": 1 / len(group)} if len(group) > 1 else {}
        loss, skipped, norm = 0.0, "", None
        for index, batch in enumerate(group):
            own = self._share(batch, is_compared=index == 0 and self._step % _CHECK_SHARES_EVERY == 0)
            with warnings.catch_warnings(), self._autocast():
                # A skipped step is reported in its log line.
                warnings.filterwarnings("ignore", "loss or gradient is NaN or Inf", PenstockWarning)
                result = pipe.step(*own.args, target=own.target, record=True, **options, **self._budget, **own.kwargs)
            loss += float(result.loss)
            skipped = result.skipped.partition("\n")[0]
            if skipped:
                break  # the gradients of the other batches would be used without those of this one
        lr = float(optimizer.param_groups[0]["lr"])
        if not skipped:
            norm = float(pipe.clip_grad_norm_(math.inf if self._options.clip is None else self._options.clip))
            if scaler is None:
                optimizer.step()
            else:
                scale, num_skipped = scaler.scale, scaler.skipped
                scaler.step(optimizer)
                scaler.update()
                if scaler.skipped > num_skipped:
                    skipped = f"gradients overflow at a loss scale of {scale:g}"
        samples = sum(size_of(batch)[0] for batch in group)
        metrics = StepMetrics(self._step, loss, time.perf_counter() - began, samples, norm, lr)
        # A scale that is found by halving it overflows several times; below 1 the gradients themselves are too large.
        return _StepOutcome(
            metrics, result.trace, skipped, counts=bool(skipped) and (scaler is None or scaler.scale < 1)
        )

    def _share(self, batch: Batch, is_compared: bool) -> Batch | Microbatch:
        """The samples of this replica. Those of different ranks are compared first if `is_compared`."""
        pipe = self._pipe
        if pipe.num_replicas == 1:
            return batch
        if is_compared:
            content = float(checksum(dict(named_leaves((batch.args, batch.kwargs, batch.target), "batch"))))
            largest, smallest = pipe.largest(content, -content)
            if largest != -smallest:
                hint = "the same batches on every rank, without a DistributedSampler; or a loop of pipe.step"
                raise RunError("all replicas must be given the same batch, of which each takes a share", hint=hint)
        return pipe.share(*batch.args, target=batch.target, **self._budget, **batch.kwargs)

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self._options.precision, self._pipe.device.type)

    def _evaluate(self, metrics: StepMetrics) -> None:
        """Evaluate the model, and add the loss to the metrics of the last step."""
        if self._eval_batches is None:
            return
        # The data may be drawn from the global random state, on which the training must not depend.
        generators = GeneratorStates.of_process()
        total = weight = 0.0
        try:
            for given in self._eval_batches() if callable(self._eval_batches) else self._eval_batches:
                batch = step_batch(given, self._pipe.has_loss_fn)
                own, samples = self._share(batch, is_compared=False), size_of(batch)[0] or 1
                with self._autocast():
                    result = self._pipe.evaluate(*own.args, target=own.target, **self._budget, **own.kwargs)
                if result.loss is None:
                    raise RunError("the batches to evaluate have no loss", hint="batches with targets or labels")
                total, weight = total + float(result.loss) * samples, weight + samples
        finally:
            generators.restore()
        if not weight:
            raise RunError("there are no batches to evaluate", hint="a function that yields at least one")
        self._metrics = self._history.steps[-1] = replace(metrics, eval_loss=total / weight)
        self._is_evaluated = True
        self._write_metrics(self._metrics)
        self._emit("eval")

    def _write_metrics(self, metrics: StepMetrics) -> None:
        if self._pipe.is_first:
            self._messages += self._logs.write(metrics)

    def _emit(self, name: str, path: Path | None = None) -> None:
        """Call the callbacks; the number of an event after a step is that of the step, which has been counted."""
        number = self._step if name in ("before_step", "end") else self._step - 1
        for callback in self._callbacks:
            callback(TrainEvent(name, number, self._pipe, self._optimizer, self._metrics, path, self._request_stop))

    def _request_stop(self) -> None:
        self._stop_requested = True


class _StepHistory:
    """The steps of a run so far."""

    def __init__(self, plan: Plan) -> None:
        self.steps: list[StepMetrics] = []
        self.num_skipped = 0
        """consecutive skipped steps"""
        self._advisor = SlowRankAdvisor(plan)
        self._recent: deque[Trace] = deque(maxlen=_NUM_RECENT)
        self._skipped = ""

    def add(self, outcome: "_StepOutcome") -> None:
        self.steps.append(outcome.metrics)
        if outcome.trace is not None:
            self._recent.append(outcome.trace)
        self._skipped = outcome.skipped
        self.num_skipped = self.num_skipped + 1 if outcome.counts else 0

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
    counts: bool
    """whether a skipped step counts towards the number that ends the training"""


def _step_report(
    steps: list[StepMetrics],
    num_steps: int | None,
    tokens: int,
    outcome: _StepOutcome,
    memory: int,
    notes: Sequence[str],
) -> StepReport:
    """The report of the last of `steps`; `num_steps` is the total number of steps, if it is known."""
    # The first step also records the model and warms caches, so it is not representative.
    usual = statistics.median(metrics.seconds for metrics in steps[1:] or steps)
    eta = None if num_steps is None else (num_steps - steps[-1].step - 1) * usual
    trace = outcome.trace
    makespan, seconds = (0.0, ()) if trace is None else (trace.makespan, trace.stage_seconds)
    slowest = max(enumerate(seconds), key=lambda item: item[1], default=(0, 0.0))
    shown = tuple(note for note in notes if note)
    return StepReport(steps[-1], num_steps, tokens, makespan, slowest, memory, eta, outcome.skipped, shown)


def _peak_bytes(device: torch.device) -> int:
    """The most bytes that this process has held so far: on its device, or in host memory if that is the CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
