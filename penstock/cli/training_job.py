"""A training run as every rank receives it, and the function that every rank runs."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.models import build_model
from penstock.cli.options import Example
from penstock.cli.plan import PlanFlags
from penstock.cli.train_log import TrainLog
from penstock.cli.train_options import CheckpointFlags, TrainOptions
from penstock.cli.user_code import UserFunction, user_errors, user_function
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.checkpoint import Loaded
    from penstock.ir import Plan

# Keys of a checkpoint's `extra` for the options of its run.
TRAIN_OPTIONS, PLAN_OPTIONS = "train_options", "plan_options"
_START = "start"  # parameter of a data function: the number of the batch to begin with
_DATA_BODY = "yield inputs, target"
_LOSS_BODY = "return functional.cross_entropy(output, target)"
_OPTIMIZER_BODY = "return torch.optim.AdamW(parameters, lr=1e-3)"


@dataclass(frozen=True)
class Job:
    """A training run as every rank receives it."""

    model: str
    example: Example
    options: TrainOptions
    plan_options: PlanFlags
    checkpoints: CheckpointFlags
    out: Path | None = None
    as_json: bool = False
    attempt: int = 0
    """number of restarts so far"""


def check_job(job: Job) -> None:
    """Refuse wrong values and names before processes are started."""
    options = job.options
    if not (math.isfinite(options.lr) and options.lr >= 0):
        raise PenstockError("the learning rate must be finite and 0 or more", lr=options.lr, hint="--lr 1e-3")
    if options.clip is not None and not (math.isfinite(options.clip) and options.clip > 0):
        raise PenstockError("the norm to clip to must be finite and above 0", clip=options.clip, hint="--clip 1.0")
    if not (math.isfinite(options.deadline) and options.deadline > 0):
        raise PenstockError("the deadline must be above 0 seconds", deadline=options.deadline, hint="--deadline 60")
    with _loss_function(options.loss), _optimizer_maker(options), user_function(options.data, _DATA_BODY):
        pass


def run_rank(job: Job, plan: "Plan") -> str:
    """Train on this rank; returns the Run as JSON."""
    from penstock.api.pipeline import Pipeline
    from penstock.api.train_loop import LoopOptions, train
    from penstock.capture import seed_generators
    from penstock.checkpoint import PeriodicSaver
    from penstock.ir import to_json
    from penstock.launch import catch_stop_signals
    from penstock.runtime import RunOptions

    options = job.options
    seed_generators(options.seed)  # also numpy's and Python's, which the data may be drawn with
    stdout = sys.stdout  # inside the user's functions prints go to stderr
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(catch_stop_signals())
        built = enter(build_model(job.model, job.example))
        loss_fn = enter(_loss_function(options.loss))
        run_options = RunOptions(seed=options.seed, nonfinite="skip", deadline_seconds=options.deadline)
        pipe = Pipeline(built.model, plan, loss_fn=loss_fn, options=run_options, **job.plan_options.granularity)
        optimizer = enter(_optimizer_maker(options))(pipe.parameters())
        data = enter(user_function(options.data, _DATA_BODY))
        loop_options = LoopOptions(options.steps, options.clip, loss_fn is not None)
        _inject_faults(job)
        log = TrainLog(plan, job.model, job.out, job.as_json, stdout)
        checkpoints, saver = job.checkpoints.options(job.attempt), None
        if checkpoints is not None:
            saver = PeriodicSaver(
                pipe,
                optimizer,
                checkpoints,
                extra={PLAN_OPTIONS: asdict(job.plan_options), TRAIN_OPTIONS: asdict(options)},
                on_resume=lambda loaded: _changes(options, optimizer, loaded),
                on_step=log.write_step,
            )
        return to_json(train(pipe, lambda start: _batches_from(data, start), optimizer, loop_options, log, saver))


def _inject_faults(job: Job) -> None:
    """Start the faults of this rank, if there are any (fault tests)."""
    import torch.distributed as dist

    from penstock.checkpoint import TEMPORARY
    from penstock.launch import FaultInjector, parse_faults

    faults = parse_faults(job.checkpoints.fault or ())
    ranks = dist.get_world_size()
    if not job.attempt and (unknown := [fault for fault in faults if fault.rank >= ranks]):
        error = PenstockError("a fault names a rank that does not exist", rank=unknown[0].rank, ranks=ranks)
        error.is_final = True
        raise error
    if faults_here := [fault for fault in faults if fault.applies_to(dist.get_rank(), job.attempt)]:
        FaultInjector(faults_here, TEMPORARY).start()


def _changes(options: TrainOptions, optimizer: Any, loaded: "Loaded") -> str:
    """The options that changed since the checkpoint was saved, as text. A new learning rate takes effect."""
    saved = loaded.extra.get(TRAIN_OPTIONS) if isinstance(loaded.extra, dict) else None
    before: dict[str, Any] = saved if isinstance(saved, dict) else {}
    now = asdict(options)
    names = [name for name in ("data", "loss", "optimizer", "lr", "clip", "seed") if name in before]
    changed = [name for name in names if before[name] != now[name]]
    if "lr" in changed and ":" not in options.optimizer:
        for group in optimizer.param_groups:
            group["lr"] = options.lr

    def text(value: object) -> str:
        return "none" if value is None else str(value)

    changes = ", ".join(f"--{name} {text(before[name])} is now {text(now[name])}" for name in changed)
    return f"changed since it was saved: {changes}" if changes else ""


# ------------------------------------------------------------------------------------------------ the user's functions


def _batches_from(data: UserFunction, number: int) -> Iterator[Any]:
    """The batches from a number on: passed as `start` if the data function takes it, else the first are skipped."""
    takes_start = _START in signature(data.function).parameters
    with user_errors(f"the function {data.name} failed", data.path):
        batches = data.function(**{_START: number} if takes_start else {})
    if not isinstance(batches, Iterable):
        got = type(batches).__name__
        raise PenstockError("the data function must return batches", function=data.name, got=got, hint=_DATA_BODY)
    left = _iterate(batches, data)
    if not takes_start:
        next(islice(left, number, number), None)
    return left


def _iterate(batches: Iterable[Any], data: UserFunction) -> Iterator[Any]:
    iterator = iter(batches)
    while True:
        with user_errors(f"the function {data.name} failed", data.path):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


@contextmanager
def _loss_function(target: str | None) -> Iterator[Callable[[Any, Any], Any] | None]:
    from torch.nn import functional

    if target is None:
        yield None
    elif ":" in target:
        with user_function(target, _LOSS_BODY) as loss:
            yield loss.function
    elif target.isidentifier() and callable(known := vars(functional).get(target)):
        yield known
    else:
        hint = "cross_entropy, mse_loss, or FILE.py:FUNCTION"
        raise PenstockError("no such loss in torch.nn.functional", loss=repr(target), hint=hint)


@contextmanager
def _optimizer_maker(options: TrainOptions) -> Iterator[Callable[[Any], Any]]:
    """A function from parameters to an optimizer."""
    from torch import optim

    name = options.optimizer
    classes = {
        key.lower(): value
        for key, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, optim.Optimizer) and value is not optim.Optimizer
    }
    if ":" in name:
        with user_function(name, _OPTIMIZER_BODY) as make:
            yield lambda parameters: _call_optimizer_function(make, parameters)
    elif (known := classes.get(name.lower())) is not None:
        yield lambda parameters: _make_optimizer(known, parameters, options.lr)
    else:
        hint = "adamw, sgd, or FILE.py:FUNCTION"
        raise PenstockError("no such optimizer in torch.optim", optimizer=repr(name), hint=hint)


def _call_optimizer_function(make: UserFunction, parameters: Any) -> Any:
    from torch import optim

    with user_errors(f"the function {make.name} failed", make.path):
        optimizer = make.function(parameters)
    if not isinstance(optimizer, optim.Optimizer):
        got, hint = type(optimizer).__name__, _OPTIMIZER_BODY
        raise PenstockError("the function must return an optimizer", function=make.name, got=got, hint=hint)
    return optimizer


def _make_optimizer(known: type, parameters: Any, lr: float) -> Any:
    try:
        return known(list(parameters), lr=lr)
    except (ValueError, TypeError) as error:
        hint = f"FILE.py:FUNCTION, def optimizer(parameters): {_OPTIMIZER_BODY}"
        raise PenstockError(f"cannot construct {known.__name__}", lr=lr, reason=error, hint=hint) from error
