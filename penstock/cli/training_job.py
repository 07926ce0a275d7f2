"""A training job: what `penstock train` asks of every rank, in words and numbers, and how a rank does it."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

from typer import Option

from penstock.cli.builds import built
from penstock.cli.named_functions import NamedFunction, named_function, told
from penstock.cli.options import Example
from penstock.cli.step_line import step_line, step_plain
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.api.loop import StepReport
    from penstock.ir.plan import Plan

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


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    model: str
    example: Example
    how: How
    as_json: bool


def check_job(job: Job) -> None:
    """Refuse names that stand for nothing, and numbers that lead nowhere, before processes are started."""
    how = job.how
    if not (math.isfinite(how.lr) and how.lr >= 0):
        raise PenstockError("the learning rate is a finite number, 0 or more", lr=how.lr, hint="--lr 1e-3")
    if how.clip is not None and not (math.isfinite(how.clip) and how.clip > 0):
        raise PenstockError("gradients are scaled down to a finite norm above 0", clip=how.clip, hint="--clip 1.0")
    with loss_of(job.how.loss), optimizer_of(job), named_function(job.how.data, DATA_EXAMPLE):
        pass


def work(job: Job, plan: "Plan") -> str:
    """Train on this rank; the Run as JSON."""
    import torch

    from penstock.api.loop import Recipe, train
    from penstock.api.pipeline import Pipeline
    from penstock.ir import codec
    from penstock.training.options import RunOptions

    torch.manual_seed(job.how.seed)
    out = sys.stdout  # in the user's functions prints go elsewhere
    with ExitStack() as open_files:
        enter = open_files.enter_context
        build = enter(built(job.model, job.example))
        loss_fn = enter(loss_of(job.how.loss))
        pipe = Pipeline(build.model, plan, loss_fn=loss_fn, options=RunOptions(seed=job.how.seed, nonfinite="skip"))
        optimizer = enter(optimizer_of(job))(pipe.parameters())
        batches = enter(batches_of(job.how.data))
        recipe = Recipe(job.how.steps, job.how.clip, loss_fn is not None)
        return codec.to_json(train(pipe, batches, optimizer, recipe, _teller(plan, job.as_json, out)))


@contextmanager
def batches_of(target: str) -> Iterator[Iterable[Any]]:
    """What the data function hands out, with errors of the user's code told in his words."""
    with named_function(target, DATA_EXAMPLE) as found:
        with told(f"the function {found.name} failed", found.path):
            batches = found.function()
        if not isinstance(batches, Iterable):
            got = type(batches).__name__
            raise PenstockError(
                "the data function does not return batches", function=found.name, got=got, hint=DATA_EXAMPLE
            )
        yield _told_batches(batches, found.name, found.path)


def _told_batches(batches: Iterable[Any], name: str, path: Any) -> Iterator[Any]:
    found = iter(batches)
    while True:
        with told(f"the function {name} failed", path):
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


def _teller(plan: "Plan", as_json: bool, out: TextIO) -> "Callable[[StepReport], None]":
    import typer

    def tell(report: "StepReport") -> None:
        seconds = plan.predicted.makespan
        line = json.dumps(step_plain(report, seconds), allow_nan=False) if as_json else step_line(report, seconds)
        typer.echo(line, file=out)

    return tell
