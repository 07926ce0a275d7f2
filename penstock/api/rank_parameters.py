"""Watches functions of torch that would use the gradients or weights of a pipeline wrongly.

Some need those of all ranks and see those of one. clip_grad_norm_ causes a warning: it clips the gradients of one rank
by their own norm. LBFGS is refused, and so is AveragedModel while the weights of other ranks are stale. torch's
GradScaler is refused for gradients that were not multiplied by its scale.
"""

import functools
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from penstock.errors import PenstockWarning, RunError
from penstock.runtime import StaleWeights

_PIPELINES: "WeakSet[RankParameters]" = WeakSet()
"""of all pipelines of this process that have ranks in other processes"""
_GRADIENTS: "WeakSet[StepGradients]" = WeakSet()
"""of all pipelines of this process"""


class StepGradients:
    """The gradients of a Pipeline; `are_unscaled` is set after `step`, whose loss torch's GradScaler cannot multiply.

    `GradScaler.step` is replaced by a method that refuses to divide such gradients by its scale, or calls torch's.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.are_unscaled = False
        _GRADIENTS.add(self)
        _watch_scalers()


class RankParameters:
    """The parameters of one rank of a Pipeline; its first rank warns once if they are clipped by their own norm.

    `torch.nn.utils.clip_grad_norm_` is replaced by a function that warns if it is given parameters of a pipeline, and
    then calls torch's. A script that imported the function by name before has torch's own: `WatchedParameters` warns if
    that iterates over `pipe.parameters()`. It does not warn of a list of parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], is_first: bool) -> None:
        self.parameters, self._is_due = parameters, is_first
        _PIPELINES.add(self)
        _watch_torch()

    def warn(self, stacklevel: int) -> None:
        """Give the warning, once."""
        if self._is_due:
            self._is_due = False
            problem = "torch's clip_grad_norm_ clips the gradients of each rank by their own norm"
            text = f"{problem}\ntry: pipe.clip_grad_norm_(max_norm)"
            warnings.warn(text, PenstockWarning, stacklevel=stacklevel + 1)


class WatchedParameters(Iterator[nn.Parameter]):
    """Iterates over parameters, and warns if torch's clip_grad_norm_ reads them."""

    def __init__(self, parameters: Iterator[nn.Parameter], own: RankParameters) -> None:
        self._parameters, self._own = parameters, own

    def __iter__(self) -> Self:
        # torch has no hook for clipping, so the frame shows which function reads the parameters.
        code, module = sys._getframe(1).f_code, sys._getframe(1).f_globals.get("__name__")
        if code.co_name == "clip_grad_norm_" and module == "torch.nn.utils.clip_grad":
            self._own.warn(stacklevel=4)  # the user's call of clip_grad_norm_, which torch wraps
        return self

    def __next__(self) -> nn.Parameter:
        return next(self._parameters)


def _owns_any(own: RankParameters | StepGradients, parameters: Iterable[Any]) -> bool:
    """Whether one of these parameters belongs to the pipeline."""
    ids = set(map(id, own.parameters.values()))
    return any(id(parameter) in ids for parameter in parameters)


def _watch_scalers() -> None:
    """Replace the step of torch's GradScaler; once."""
    step = torch.amp.GradScaler.step
    if hasattr(step, "is_watched"):
        return

    @functools.wraps(step)
    def watched_step(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if any(each.are_unscaled and _owns_any(each, parameters) for each in list(_GRADIENTS)):
                raise RunError(
                    "torch's GradScaler divides gradients by a scale that pipe.step has not multiplied them by",
                    hint="scaler = penstock.GradScaler(), Pipeline(..., scaler=scaler)",
                )
        return step(self, optimizer, *args, **kwargs)

    watched_step.is_watched = True
    torch.amp.GradScaler.step = watched_step


def _watch_torch() -> None:
    """Replace functions of torch where scripts look them up when they call them; once."""
    clip = torch.nn.utils.clip_grad_norm_
    if hasattr(clip, "is_watched"):
        return

    @functools.wraps(clip)
    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling() and not isinstance(parameters, Tensor):
            given = list(parameters)
            for own in list(_PIPELINES):
                if _owns_any(own, given):
                    own.warn(stacklevel=2)
            # torch warns of a generator that has no elements left.
            parameters = (each for each in given) if isinstance(parameters, GeneratorType) else given
        return clip(parameters, *args, **kwargs)

    clip_grad_norm_.is_watched = True
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_
    update = AveragedModel.update_parameters

    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        stale = StaleWeights.find(model)
        if stale is not None:
            stale.check(model, "average pipe.named_parameters() on every rank")
        update(self, model)

    AveragedModel.update_parameters = update_parameters
    register_optimizer_step_pre_hook(_refuse_lbfgs)


def _refuse_lbfgs(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Refuse a step of LBFGS on the parameters of one rank: its direction depends on all gradients of the model."""
    if isinstance(optimizer, torch.optim.LBFGS):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(_owns_any(own, parameters) for own in list(_PIPELINES)):
            hint = "an optimizer that updates each parameter by its own gradient, such as AdamW, or local=True"
            raise RunError("LBFGS needs the gradients of all ranks, and has those of this rank", hint=hint)
