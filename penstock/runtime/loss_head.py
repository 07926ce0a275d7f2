"""Ending: what follows the last stage, the user's loss function or the loss that the model returns itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.capture import Captured
from penstock.errors import RunError
from penstock.ir import LossRule, transform
from penstock.runtime.adding import Added
from penstock.runtime.losses.added import AddedLosses
from penstock.runtime.losses.weighing import Weighing
from penstock.runtime.scaler import GradScaler
from penstock.runtime.step_data import StepData


class LossHead:
    """The loss of every microbatch, and the gradient with which its backward begins."""

    def __init__(self, captured: Captured, weighing: Weighing, scaler: GradScaler | None) -> None:
        self._captured, self._weighing, self.scaler = captured, weighing, scaler
        self._added = AddedLosses()

    @property
    def scale(self) -> float:
        """What gradients are multiplied with for a scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def is_scaled(self) -> bool:
        """Whether a scaler looks after gradients that are too large."""
        return self.scaler is not None

    @property
    def rule(self) -> LossRule | None:
        """By what the loss of a batch is made of those of its microbatches, as far as that is known."""
        return self._weighing.rule

    def roots(self, recording: Any, is_training: bool) -> tuple[str, ...]:
        """The values that the loss is made of."""
        if self._weighing.has_function:
            return tuple(recording.graph.outputs)
        try:
            return (self._weighing.loss_name(recording),)
        except RunError:
            if is_training:
                raise
            return ()

    def remarks(self, load: StepData) -> tuple[str, ...]:
        """What the user should know about the losses of a step's microbatches."""
        if not load.is_training:
            return self._weighing.doubts if load.losses else ()
        return (*(self._weighing.remarks(load) if load.losses else ()), *self._added.doubts())

    def finish(self, load: StepData, microbatch: int, left: dict[str, Any]) -> Tensor | None:
        """The loss of a microbatch from what left the last stage."""
        recording, piece = load.inputs.recordings[microbatch], load.inputs.microbatches[microbatch]
        values = {**load.inputs.named[microbatch], **left}
        output = self._captured.output(recording, values)
        if load.keeps_outputs:
            load.outputs[microbatch] = transform(output, _detached)
        if not self._has_loss(load, microbatch):
            return None
        loss = self._loss(load, microbatch, output, values)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise RunError("a loss is one number", found=found, microbatch_size=piece.size)
        if not loss.is_floating_point():
            raise RunError("a loss is a floating-point number", found=loss.dtype, hint="loss.float()")
        if load.is_training and not loss.requires_grad:
            way_out = "unfreeze a parameter, or use eval"
            hint = way_out if torch.is_grad_enabled() else "call step outside of torch.no_grad()"
            raise RunError("the loss depends on nothing that needs a gradient", hint=hint)
        self._weighing.look_at(load, microbatch, output, loss)
        # A copy: some losses are computed in the memory of a tensor as large as the output, and would keep it.
        load.losses[microbatch] = loss.detach().reshape(()).clone()
        return loss.reshape(())

    def _has_loss(self, load: StepData, microbatch: int) -> bool:
        """An evaluation may have none: without a target, or of a model that was given no labels."""
        if self._weighing.has_function:
            return load.is_training or load.inputs.microbatches[microbatch].target is not None
        return bool(self.roots(load.inputs.recordings[microbatch], load.is_training))

    def _loss(self, load: StepData, microbatch: int, output: Any, values: dict[str, Any]) -> Any:
        if self._weighing.has_function:
            return self._weighing.loss(load, microbatch, output)
        return values[self.roots(load.inputs.recordings[microbatch], load.is_training)[0]]

    def added(self, load: StepData, stage: int, microbatch: int, added: Sequence[Added]) -> Tensor:
        """What a stage adds to the loss of the batch for a microbatch."""
        return self._added.total(added, stage, load.inputs.share(microbatch))

    def gradient(self, load: StepData, microbatch: int) -> Tensor | None:
        """The gradient with which the backward of a microbatch begins; None where it has no say in the loss."""
        weight = self.weights(load)[microbatch]
        return torch.full_like(load.losses[microbatch], weight * self.scale) if weight else None

    def weights(self, load: StepData) -> tuple[float, ...]:
        """The weight of every microbatch's loss in that of the batch."""
        if load.weights is None:
            load.weights = self._weighing.of(load)
        return load.weights


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
