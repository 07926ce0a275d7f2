"""The flags of `penstock train`, a run of it as every rank receives it, and the function that every rank runs.

The options of the training loop (`api/train_options.py`) and of the plan (`plan.py`) are flags too. A run that resumes
reports every option that has changed, except those in `_UNREPORTED`.
"""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from typer import Option

from penstock.api.train_options import TrainOptions
from penstock.cli.models import build_model, on_device
from penstock.cli.options import Example
from penstock.cli.plan import LossExample, PlanFlags
from penstock.cli.train_log import STEPS, TrainLog
from penstock.cli.user_code import UserFunction, user_errors, user_function
from penstock.errors import PenstockError, RunError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from penstock.checkpoint import CheckpointOptions, Loaded
    from penstock.ir import Plan
    from penstock.launch import RestartPolicy

AUTO = "auto"
DEVICES = ("cpu", "cuda")
# Keys of a checkpoint's `extra` for the options of its run.
TRAIN_OPTIONS, PLAN_OPTIONS = "train_options", "plan_options"
_START = "start"  # parameter of a data function: the number of the batch to begin with
_DATA_BODY = "yield inputs, target"
_LOSS_BODY = "return functional.cross_entropy(output, target)"
_OPTIMIZER_BODY = "return torch.optim.AdamW(parameters, lr=1e-3)"
_CALLBACK_BODY = "if event.name == 'after_step': print(event.metrics)"


@dataclass(frozen=True)
class TrainFlags:
    """The user's functions, and settings of the run that are arguments in Python."""

    data: Annotated[
        str, Option(metavar="FILE.py:FUNCTION", help="Yields inputs, or with --loss, pairs of inputs and target.")
    ]
    loss: Annotated[
        str | None, Option(metavar="NAME", help="A function of torch.nn.functional, or FILE.py:FUNCTION.")
    ] = None
    optimizer: Annotated[str, Option(metavar="NAME", help="A class of torch.optim, or FILE.py:FUNCTION.")] = "adamw"
    lr: Annotated[float, Option(metavar="RATE", help="Learning rate of an optimizer given by name.")] = 1e-3
    eval_data: Annotated[
        str | None, Option(metavar="FILE.py:FUNCTION", help="Yields batches to evaluate, of the same form as --data.")
    ] = None
    callback: Annotated[
        list[str] | None,
        Option(metavar="FILE.py:FUNCTION", help="Called on every rank with events of the training; may be repeated."),
    ] = None
    replicas: Annotated[
        int, Option(min=1, metavar="N", help="Copies of the pipeline, which share the samples of every batch.")
    ] = 1
    device: Annotated[
        str | None,
        Option(
            metavar="TYPE",
            help="Train on cpu, or cuda: rank n of a host uses GPU n, over NCCL. Default: where MODEL and --data put "
            "tensors.",
        ),
    ] = None
    seed: Annotated[int, Option(min=0, metavar="N", help="Seed of the weights and of all random numbers.")] = 0
    deadline: Annotated[
        float, Option(metavar="SECONDS", help="Time a rank waits for another before it is reported as hung.")
    ] = 60.0


_UNREPORTED = frozenset(("eval_data", "callback", "replicas", "device", "deadline", "eval_every", "log"))
"""options of TrainFlags and TrainOptions that do not change what is learned from the data"""


@dataclass(frozen=True)
class CheckpointFlags:
    """Checkpoints, resuming and restarts."""

    checkpoint: Annotated[
        Path | None, Option(metavar="DIRECTORY", help="Save checkpoints there: regularly, at the end, and on SIGTERM.")
    ] = None
    every: Annotated[int, Option(min=1, metavar="N", help="Steps between checkpoints.")] = 100
    keep: Annotated[int, Option(min=1, metavar="N", help="Number of newest checkpoints to keep.")] = 3
    asynchronous: Annotated[bool, Option("--asynchronous", help="Write checkpoints while training continues.")] = False
    resume: Annotated[
        str | None, Option(metavar="WHERE", help='A checkpoint to resume from, or "auto": the newest good one, if any.')
    ] = None
    restarts: Annotated[int, Option(min=0, metavar="N", help="Maximum automatic restarts after a rank failure.")] = 3
    min_ranks: Annotated[
        int | None,
        Option(min=1, metavar="K", help="Minimum ranks: re-plan and continue if a rank fails permanently."),
    ] = None
    fault: Annotated[
        list[str] | None,
        Option(metavar="FAULT", help="Inject a fault, such as kill,rank=1,step=5; needs PENSTOCK_ALLOW_FAULTS=1."),
    ] = None

    @property
    def restart_policy(self) -> "RestartPolicy":
        """The restart policy; without checkpoints there is nothing to restart from."""
        from penstock.launch import RestartPolicy

        return RestartPolicy(self.restarts if self.checkpoint else 0, self.min_ranks)

    def options(self, attempt: int) -> "CheckpointOptions | None":
        """The checkpoint options of a rank; None without checkpoints."""
        from penstock.checkpoint import CheckpointOptions

        if self.checkpoint is None:
            return None
        return CheckpointOptions(self.checkpoint, self.every, self.keep, self.asynchronous, self.source(attempt))

    def source(self, attempt: int = 0) -> Path | None:
        """The checkpoint to resume from; None to begin. After a restart always the newest one of this run."""
        from penstock.checkpoint import CheckpointDir

        if CheckpointDir(self.checkpoint).has_any and (attempt or self.resume == AUTO):
            return self.checkpoint
        return None if self.resume in (None, AUTO) else Path(self.resume)

    @property
    def newest_step(self) -> int | None:
        """The step of the checkpoint that a restart would resume from."""
        from penstock.checkpoint import find_checkpoints, step_of

        source = self.source(attempt=1) if self.checkpoint is not None else None
        return None if source is None else step_of(find_checkpoints(source)[0])


@dataclass(frozen=True)
class Job:
    """A training run as every rank receives it."""

    model: str
    example: Example
    flags: TrainFlags
    options: TrainOptions
    plan_options: PlanFlags
    checkpoints: CheckpointFlags
    out: Path | None = None
    as_json: bool = False
    attempt: int = 0
    """number of restarts so far"""
    run_id: str = field(default_factory=lambda: uuid4().hex[:8])
    """of the run in logs; the same in all attempts"""


def check_job(job: Job) -> None:
    """Refuse wrong values and names before processes are started."""
    flags, options = job.flags, job.options
    if not (math.isfinite(flags.lr) and flags.lr >= 0):
        raise PenstockError("the learning rate must be finite and 0 or more", lr=flags.lr, hint="--lr 1e-3")
    if not (math.isfinite(flags.deadline) and flags.deadline > 0):
        raise PenstockError("the deadline must be above 0 seconds", deadline=flags.deadline, hint="--deadline 60")
    if options.eval_every is not None and flags.eval_data is None:
        raise PenstockError("--eval-every needs --eval-data", hint="--eval-data FILE.py:FUNCTION")
    if flags.device is not None:
        if flags.device not in DEVICES:
            hint = " or ".join(f"--device {name}" for name in DEVICES)
            hint += "; --device of `penstock plan` names a device to predict for, such as h100"
            raise PenstockError("device must be cpu or cuda", got=repr(flags.device), hint=hint)
        from penstock.launch import check_devices

        check_devices(flags.device, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if flags.replicas > 1 and job.checkpoints.min_ranks is not None:
        hint = "leave out one of them; --restarts restarts all ranks"
        raise PenstockError("--min-ranks does not combine with --replicas", hint=hint)
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(_loss_function(flags.loss))
        enter(_optimizer_maker(flags))
        enter(user_function(flags.data, _DATA_BODY))
        if flags.eval_data:
            enter(user_function(flags.eval_data, _DATA_BODY))
        for name in flags.callback or ():
            enter(user_function(name, _CALLBACK_BODY))


def autocast(job: Job) -> "AbstractContextManager[Any]":
    """Autocast of the precision of a job on its device, by default that of this machine."""
    import torch

    from penstock.api import train_loop

    kind = job.flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return train_loop.autocast(job.options.precision, kind)


@contextmanager
def loss_example(loss: str | None, data: str, device: Any = None) -> "Iterator[LossExample]":
    """The loss function, None without one, and the first batch of the data function."""
    from penstock.api.train_loop import step_batch

    with _loss_function(loss) as function, user_function(data, _DATA_BODY) as batches:
        with redirect_stdout(sys.stderr):
            batch = next(_batches_from(batches, 0, device), None)
        if batch is None:
            raise RunError("the data has no batches", hint="a data function that yields at least one")
        yield LossExample(function, step_batch(batch, has_loss_fn=function is not None))


def run_rank(job: Job, plan: "Plan") -> str:
    """Train on this rank; returns the Run as JSON."""
    from penstock.api.pipeline import Pipeline
    from penstock.api.train_loop import fit
    from penstock.capture import seed_generators
    from penstock.checkpoint import PeriodicSaver
    from penstock.ir import to_json
    from penstock.launch import catch_stop_signals, use_local_device
    from penstock.runtime import GradScaler, RunOptions

    flags, options = job.flags, job.options
    device = None if flags.device is None else use_local_device(flags.device)
    seed_generators(flags.seed)  # also numpy's and Python's, which the data may be drawn with
    stdout = sys.stdout  # inside the user's functions prints go to stderr
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(catch_stop_signals())
        built = enter(build_model(job.model, job.example, device))
        loss_fn = enter(_loss_function(flags.loss))
        is_meta = device is not None and any(parameter.is_meta for parameter in built.model.parameters())
        with device if device is not None and is_meta else nullcontext():  # where weights are then allocated
            pipe = Pipeline(
                built.model,
                plan,
                loss_fn=loss_fn,
                mesh=job_mesh(flags, plan.num_ranks),
                scaler=GradScaler() if options.precision == "fp16" else None,
                options=RunOptions(seed=flags.seed, nonfinite="skip", deadline_seconds=flags.deadline),
                **job.plan_options.granularity,
            )
        optimizer = enter(_optimizer_maker(flags))(pipe.parameters())
        data = enter(user_function(flags.data, _DATA_BODY))
        eval_data = enter(user_function(flags.eval_data, _DATA_BODY)) if flags.eval_data else None
        callbacks = [enter(user_function(name, _CALLBACK_BODY)) for name in flags.callback or ()]
        _inject_faults(job)
        checkpoints, saver = job.checkpoints.options(job.attempt), None
        if checkpoints is not None:
            saver = PeriodicSaver(
                pipe,
                optimizer,
                checkpoints,
                extra={PLAN_OPTIONS: asdict(job.plan_options), TRAIN_OPTIONS: asdict(flags) | asdict(options)},
                on_resume=lambda loaded: _apply_changes(flags, options, optimizer, loaded),
            )
        if job.out is not None:
            options = replace(options, log=[*(options.log or ()), f"jsonl:{job.out / STEPS}"])
        run = fit(
            pipe,
            lambda start: _batches_from(data, start, device),
            optimizer,
            options,
            eval_batches=None if eval_data is None else lambda: _batches_from(eval_data, 0, device),
            callbacks=[_callback(function) for function in callbacks],
            checkpoints=saver,
            on_step=TrainLog(plan, job.model, job.as_json, stdout),
            run_id=job.run_id,
        )
        return to_json(run)


def job_mesh(flags: TrainFlags, ranks: int) -> "DeviceMesh | None":
    """The mesh of the replicas and the ranks of each; None for one replica over gloo, which is the default group."""
    kind = flags.device or "cpu"
    return None if kind == "cpu" and flags.replicas == 1 else _mesh(kind, flags.replicas, ranks)


@cache
def _mesh(kind: str, replicas: int, ranks: int) -> "DeviceMesh":
    from penstock.launch import pipeline_mesh

    return pipeline_mesh(kind, replicas, ranks)


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


def _apply_changes(flags: TrainFlags, options: TrainOptions, optimizer: Any, loaded: "Loaded") -> str:
    """Set a learning rate that changed since the checkpoint was saved; returns all changed options as text."""
    saved = loaded.extra.get(TRAIN_OPTIONS) if isinstance(loaded.extra, dict) else None
    before: dict[str, Any] = saved if isinstance(saved, dict) else {}
    now = asdict(flags) | asdict(options)
    # A constant learning rate does not depend on the number of steps.
    unreported = _UNREPORTED | {"steps"} if options.lr_schedule in (None, "constant") else _UNREPORTED
    changed = [name for name in now if name in before and name not in unreported and before[name] != now[name]]
    for group in optimizer.param_groups:
        if "lr" in changed and ":" not in flags.optimizer:
            group["lr"] = group["initial_lr"] = flags.lr
        elif not options.changes_lr and {"lr_schedule", "warmup"} & set(changed) and "initial_lr" in group:
            group["lr"] = group["initial_lr"]

    def text(value: object) -> str:
        return "none" if value is None else str(value)

    changes = ", ".join(f"--{name.replace('_', '-')} {text(before[name])} is now {text(now[name])}" for name in changed)
    return f"changed since it was saved: {changes}" if changes else ""


# ------------------------------------------------------------------------------------------------ the user's functions


def _batches_from(data: UserFunction, number: int, device: Any) -> Iterator[Any]:
    """The batches from a number on: passed as `start` if the data function takes it, else the first are skipped.

    With a device, their tensors are moved there.
    """
    takes_start = _START in signature(data.function).parameters
    with user_errors(f"the function {data.name} failed", data.path):
        batches = data.function(**{_START: number} if takes_start else {})
    if not isinstance(batches, Iterable):
        got = type(batches).__name__
        raise PenstockError("the data function must return batches", function=data.name, got=got, hint=_DATA_BODY)
    left = _iterate(batches, data)
    if not takes_start:
        next(islice(left, number, number), None)
    return left if device is None else (on_device(batch, device) for batch in left)


def _iterate(batches: Iterable[Any], data: UserFunction) -> Iterator[Any]:
    """The batches; errors of the user's iterator name the line, those of the loop that uses the batches do not."""
    with user_errors(f"the function {data.name} failed", data.path):
        iterator = iter(batches)
    while True:
        with user_errors(f"the function {data.name} failed", data.path):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def _callback(callback: UserFunction) -> Callable[[Any], None]:
    """A callback whose errors name the line in the user's file."""

    def call(event: Any) -> None:
        with user_errors(f"the function {callback.name} failed at {event.name}", callback.path):
            callback.function(event)

    return call


@contextmanager
def _loss_function(target: str | None) -> Iterator[Callable[[Any, Any], Any] | None]:
    """The function that --loss names; None without it."""
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
def _optimizer_maker(flags: TrainFlags) -> Iterator[Callable[[Any], Any]]:
    """A function from parameters to an optimizer."""
    from torch import optim

    name = flags.optimizer
    classes = {
        key.lower(): value
        for key, value in vars(optim).items()
        if isinstance(value, type) and issubclass(value, optim.Optimizer) and value is not optim.Optimizer
    }
    if ":" in name:
        with user_function(name, _OPTIMIZER_BODY) as user:

            def call(parameters: Any) -> Any:
                with user_errors(f"the function {user.name} failed", user.path):
                    optimizer = user.function(parameters)
                if not isinstance(optimizer, optim.Optimizer):
                    got, hint = type(optimizer).__name__, _OPTIMIZER_BODY
                    raise PenstockError("the function must return an optimizer", function=user.name, got=got, hint=hint)
                return optimizer

            yield call
    elif (known := classes.get(name.lower())) is not None:

        def construct(parameters: Any) -> Any:
            try:
                return known(list(parameters), lr=flags.lr)
            except (ValueError, TypeError) as error:
                hint = f"FILE.py:FUNCTION, def optimizer(parameters): {_OPTIMIZER_BODY}"
                raise PenstockError(
                    f"cannot construct {known.__name__}", lr=flags.lr, reason=error, hint=hint
                ) from error

        yield construct
    else:
        hint = "adamw, sgd, or FILE.py:FUNCTION"
        raise PenstockError("no such optimizer in torch.optim", optimizer=repr(name), hint=hint)
