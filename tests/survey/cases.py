"""A model with a batch and a loss, and what became of it as a pipeline."""

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.errors import PenstockError
from tests.parity import tensors_of
from tests.plans import quick_plan

RANKS, MICROBATCHES = 2, 2
RESULTS = ("exact", "warned", "refused", "wrong", "broken")

# The note of a check that is no warning: the results are those of the unsplit model, from the same seeds.
RANDOM = "the model draws random numbers"

# A file of a library, without the directories that it is installed in.
_SOURCE = re.compile(r"\S*/([^/\s]+/[^/\s]+\.py)")


@dataclass(frozen=True)
class Case:
    """A model in training mode, a batch of whole samples, and a loss unless the model returns it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    target: Any = None
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    """in which the model is captured and run"""


@dataclass(frozen=True)
class Outcome:
    """The result of a case, one of `RESULTS`, and the reason if it is not exact."""

    result: str
    reason: str = ""


def squares(output: object, target: object = None) -> Tensor:
    """A loss for models without one: the mean square of every output that has a gradient, summed."""
    outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad and tensor.dim()]
    return torch.stack([tensor.float().square().mean() for tensor in outputs]).sum()


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    """The loss of a classifier, which may return its logits first or in a dict as `out`."""
    logits = output["out"] if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else output
    return functional.cross_entropy(logits, target)


def mean_squared_error(output: Any, target: Tensor) -> Tensor:
    """The distance of the first tensor of the output from the target."""
    return functional.mse_loss(tensors_of(output)[0], target)


def run(case: Case, microbatches: int = MICROBATCHES) -> Outcome:
    """Plan and check a case on two ranks."""
    try:
        with case.context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = (case.args, dict(case.kwargs))
            choices = {"ranks": RANKS, "microbatches": microbatches, "schedule": "1f1b", "loss_fn": case.loss_fn}
            plan = quick_plan(case.model, *batch, **choices)
            report = penstock.check(case.model, plan, *batch, loss_fn=case.loss_fn, target=case.target)
    except PenstockError as error:
        return Outcome("refused", _SOURCE.sub(r"\1", str(error).partition("\n")[0]))
    except Exception as error:
        return Outcome("broken", f"{type(error).__name__}: {error}".partition("\n")[0])
    if not report.loop.ok:
        return Outcome("wrong", str(report.loop).partition("\n")[0])
    if report.whole is not None:
        return Outcome("exact") if report.ok else Outcome("warned", str(report).partition("\n")[0])
    coupled = [note for note in report.notes if not note.startswith(RANDOM)]
    return Outcome("warned", coupled[0]) if coupled else Outcome("exact")
