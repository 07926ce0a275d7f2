"""A training job: what `penstock train` asks of every rank, in words and numbers, and how a rank does it."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from penstock.cli.builds import built
from penstock.cli.changes import asked, changes
from penstock.cli.lasting import Lasting
from penstock.cli.named_functions import NamedFunction, named_function, told
from penstock.cli.options import Example
from penstock.cli.plan import Wishes
from penstock.cli.voice import Voice
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.ir import Plan

_START = "start"
"""of a data function: with which batch to begin"""
DATA_EXAMPLE = "yield inputs, target"
LOSS_EXAMPLE = "return functional.cross_entropy(output, target)"
OPTIMIZER_EXAMPLE = "return torch.optim.AdamW(parameters, lr=1e-3)"


@dataclass(frozen=True)
class How:
    """On what to train, and how."""

    data: Annotated[str, Option(metavar="FILE.py:FUNCTION", help="It yields inputs, or with --loss inputs and target.")]
    loss: Annotated[str | None, Option(metavar="NAME", help="Of torch.nn.functional, or FILE.py:FUNCTION.")] = None
    optimizer: Annotated[str, Option(metavar="NAME", help="Of torch.optim, or FILE.py:FUNCTION.")] = "adamw"
    lr: Annotated[float, Option(metavar="RATE", help="The learning rate of an optimizer by name.")] = 1e-3
    steps: Annotated[int | None, Option(min=1, metavar="N", help="Steps; else until the batches end.")] = None
    clip: Annotated[float | None, Option(metavar="NORM", help="Scale gradients down to this norm.")] = None
    seed: Annotated[int, Option(min=0, metavar="N", help="Of the model's weights and random numbers.")] = 0
    deadline: Annotated[
        float, Option(metavar="SECONDS", help="How long a rank waits for another before it counts as hung.")
    ] = 60.0


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    model: str
    example: Example
    how: How
    wishes: Wishes
    lasting: Lasting
    out: Path | None = None
    as_json: bool = False
    life: int = 0
    """how often it was taken up again"""


def check_job(job: Job) -> None:
    """Refuse names that stand for nothing, and numbers that lead nowhere, before processes are started."""
    how = job.how
    if not (math.isfinite(how.lr) and how.lr >= 0):
        raise PenstockError("the learning rate is a finite number, 0 or more", lr=how.lr, hint="--lr 1e-3")
    if how.clip is not None and not (math.isfinite(how.clip) and how.clip > 0):
        raise PenstockError("gradients are scaled down to a finite norm above 0", clip=how.clip, hint="--clip 1.0")
    if not (math.isfinite(how.deadline) and how.deadline > 0):
        raise PenstockError("a deadline is seconds above 0", deadline=how.deadline, hint="--deadline 60")
    with loss_of(job.how.loss), optimizer_of(job), named_function(job.how.data, DATA_EXAMPLE):
        pass


def work(job: Job, plan: "Plan") -> str:
    """Train on this rank; the Run as JSON."""
    from penstock.api.loop import Recipe, train
    from penstock.api.pipeline import Pipeline
    from penstock.capture import seed_generators
    from penstock.ir import to_json
    from penstock.launch import catch_stop_signals
    from penstock.runtime import RunOptions

    seed_generators(job.how.seed)  # also those of numpy and Python, which data may be drawn with
    out = sys.stdout  # in the user's functions prints go elsewhere
    with ExitStack() as open_files:
        enter = open_files.enter_context
        enter(catch_stop_signals())
        build = enter(built(job.model, job.example))
        loss_fn = enter(loss_of(job.how.loss))
        options = RunOptions(seed=job.how.seed, nonfinite="skip", deadline_seconds=job.how.deadline)
        pipe = Pipeline(build.model, plan, loss_fn=loss_fn, options=options)
        optimizer = enter(optimizer_of(job))(pipe.parameters())
        batches = enter(batches_of(job.how.data))
        recipe = Recipe(job.how.steps, job.how.clip, loss_fn is not None)
        _inject(job)
        keeping, voice = job.lasting.keeping(job.life), Voice(plan, job, out)
        if keeping is not None:
            keeping = replace(keeping, extra=asked(job), resumed=changes(job, optimizer), taken=voice.write_down)
        return to_json(train(pipe, batches, optimizer, recipe, voice, keeping))


def _inject(job: Job) -> None:
    """Let the faults of this rank happen, if there are any."""
    import torch.distributed as dist

    from penstock.checkpoint import DRAFT
    from penstock.launch import FaultInjector, parse_faults

    faults = parse_faults(job.lasting.fault or ())
    ranks = dist.get_world_size()
    if not job.life and (strange := [fault for fault in faults if fault.rank >= ranks]):
        error = PenstockError("a fault is for a rank that there is not", rank=strange[0].rank, ranks=ranks)
        error.is_final = True
        raise error
    if own := [fault for fault in faults if fault.applies_to(dist.get_rank(), job.life)]:
        FaultInjector(own, DRAFT).start()


@contextmanager
def batches_of(target: str) -> "Iterator[Callable[[int], Iterable[Any]]]":
    """What hands out batches from one on, with errors of the user's code told in his words."""
    with named_function(target, DATA_EXAMPLE) as found:
        yield lambda number: _batches_from(found, number)


def _batches_from(found: NamedFunction, number: int) -> Iterator[Any]:
    """The batches from one on: a function that takes `start` begins there, of others the first ones are passed over."""
    can_start = _START in signature(found.function).parameters
    with told(f"the function {found.name} failed", found.path):
        batches = found.function(**{_START: number} if can_start else {})
    if not isinstance(batches, Iterable):
        got = type(batches).__name__
        raise PenstockError(
            "the data function does not return batches", function=found.name, got=got, hint=DATA_EXAMPLE
        )
    left = _told_batches(batches, found)
    if not can_start:
        next(islice(left, number, number), None)
    return left


def _told_batches(batches: Iterable[Any], source: NamedFunction) -> Iterator[Any]:
    found = iter(batches)
    while True:
        with told(f"the function {source.name} failed", source.path):
            try:
                batch = next(found)
            except StopIteration:
                return
        yield batch


@contextmanager
def loss_of(target: str | None) -> Iterator[Callable[[Any, Any], Any] | None]:
    """A function of the user's, one of torch.nn.functional by its name, or none."""
    from torch.nn import functional

    if target is None:
        yield None
    elif ":" in target:
        with named_function(target, LOSS_EXAMPLE) as found:
            yield found.function
    elif target.isidentifier() and callable(known := vars(functional).get(target)):
        yield known
    else:
        hint = "cross_entropy, mse_loss, or FILE.py:FUNCTION"
        raise PenstockError("no such loss in torch.nn.functional", loss=repr(target), hint=hint)


@contextmanager
def optimizer_of(job: Job) -> Iterator[Callable[[Any], Any]]:
    """What makes an optimizer of parameters: a function of the user's, or a class of torch.optim by its name."""
    from torch import optim

    classes = {name.lower(): found for name, found in vars(optim).items() if _is_optimizer(found)}
    if ":" in job.how.optimizer:
        with named_function(job.how.optimizer, OPTIMIZER_EXAMPLE) as found:
            yield lambda parameters: _made_by(found, parameters)
    elif (known := classes.get(job.how.optimizer.lower())) is not None:
        yield lambda parameters: _made_as(known, parameters, job.how.lr)
    else:
        hint = "adamw, sgd, or FILE.py:FUNCTION"
        raise PenstockError("no such optimizer in torch.optim", optimizer=repr(job.how.optimizer), hint=hint)


def _made_by(found: NamedFunction, parameters: Any) -> Any:
    from torch import optim

    with told(f"the function {found.name} failed", found.path):
        made = found.function(parameters)
    if not isinstance(made, optim.Optimizer):
        got = type(made).__name__
        raise PenstockError(
            "the function does not return an optimizer", function=found.name, got=got, hint=OPTIMIZER_EXAMPLE
        )
    return made


def _made_as(known: type, parameters: Any, lr: float) -> Any:
    try:
        return known(list(parameters), lr=lr)
    except (ValueError, TypeError) as error:
        hint = f"FILE.py:FUNCTION, def optimizer(parameters): {OPTIMIZER_EXAMPLE}"
        raise PenstockError(f"{known.__name__} cannot be made", lr=lr, reason=error, hint=hint) from error


def _is_optimizer(found: object) -> bool:
    from torch import optim

    return isinstance(found, type) and issubclass(found, optim.Optimizer) and found is not optim.Optimizer
