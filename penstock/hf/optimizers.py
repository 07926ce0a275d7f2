"""Optimizers of a PipelineTrainer: each rank updates its own parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.api.pipeline import Pipeline
from penstock.errors import RunError
from penstock.runtime import GradScaler


class AmpScaler(GradScaler):
    """A GradScaler that the optimizer of accelerate steps with."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> Any:
        """Step the optimizer, unless gradients overflowed on any rank."""
        if closure is not None:
            raise RunError("an optimizer with a closure cannot be scaled", hint="bf16=True instead of fp16=True")
        return super().step(optimizer)


def check_optimizer_class(kind: Any, *_: Any) -> None:
    """Refuse an optimizer that needs the parameters or gradients of all ranks at once."""
    if isinstance(kind, type) and issubclass(kind, torch.optim.LBFGS):
        raise RunError(
            "LBFGS needs the gradients of all ranks and a closure", hint="an optimizer that updates each parameter"
        )


def keep_own_parameters(optimizer: Any, model: nn.Module, pipe: Pipeline) -> None:
    """Restrict an optimizer over the whole model to this rank's parameters; its groups and their settings stay."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has this attribute
    check_optimizer_class(type(optimizer))
    known, own = {id(p) for p in model.parameters()}, {id(p) for p in pipe.parameters()}
    known |= own  # for a model on the meta device, the pipeline has created new parameters
    for group in optimizer.param_groups:
        if unknown := [p for p in group["params"] if id(p) not in known]:
            raise RunError(
                "the optimizer must have parameters of the model only",
                shape=tuple(unknown[0].shape),
                hint="an optimizer over model.parameters(), of the model that the trainer is given",
            )
        group["params"] = [p for p in group["params"] if id(p) in own]
    for parameter in [p for p in optimizer.state if id(p) not in own]:
        del optimizer.state[parameter]
