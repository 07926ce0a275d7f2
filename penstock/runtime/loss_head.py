"""The loss of each microbatch after the last stage, and its weight in the loss of the batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.capture import Captured, Recording
from penstock.errors import RunError
from penstock.ir import LossRule, transform
from penstock.runtime.adding import Added
from penstock.runtime.losses.added import AddedLosses
from penstock.runtime.losses.weighing import Weighing
from penstock.runtime.scaler import GradScaler
from penstock.runtime.step import Step


class LossHead:
    """Computes losses by the user's loss function, or takes the loss that the model returns."""

    def __init__(self, captured: Captured, weighing: Weighing, scaler: GradScaler | None) -> None:
        self._captured, self._weighing, self.scaler = captured, weighing, scaler
        self._added = AddedLosses()

    @property
    def has_loss_fn(self) -> bool:
        """Whether the loss is computed by a loss function, and not by the model."""
        return self._weighing.has_function

    @property
    def rule(self) -> LossRule | None:
        """How the loss of a batch is made of those of its microbatches, as far as that is known."""
        return self._weighing.rule

    @property
    def scale(self) -> float:
        """The factor of all gradients, set by the scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def roots(self, recording: Recording, is_training: bool) -> tuple[str, ...]:
        """The values that the loss is computed from; empty if an evaluated model returns no loss."""
        if self._weighing.has_function:
            return tuple(recording.graph.outputs)
        try:
            return (self._weighing.loss_name(recording),)
        except RunError:
            if is_training:
                raise
            return ()

    def loss(self, step: Step, microbatch: int, stage_outputs: dict[str, Any]) -> Tensor | None:
        """Compute and store the loss of a microbatch; None if an evaluation has none."""
        recording, own = step.recordings[microbatch], step.microbatches[microbatch]
        values = {**step.inputs[microbatch], **stage_outputs}
        output = self._captured.output(recording, values)
        if step.keeps_outputs:
            step.outputs[microbatch] = transform(output, _detached)
        if self._weighing.has_function:
            if not step.is_training and own.target is None:
                return None
            loss = self._weighing.loss(step, microbatch, output)
        else:
            roots = self.roots(recording, step.is_training)
            if not roots:
                return None
            loss = values[roots[0]]
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise RunError("a loss must be one number", found=found, microbatch_size=own.size)
        if not loss.is_floating_point():
            raise RunError("a loss must be a floating-point number", found=loss.dtype, hint="loss.float()")
        if step.is_training and not loss.requires_grad:
            hint = "unfreeze a parameter, or use eval"
            hint = hint if torch.is_grad_enabled() else "call step outside of torch.no_grad()"
            raise RunError("the loss does not depend on anything that requires a gradient", hint=hint)
        self._weighing.look_at(step, microbatch, output, loss)
        # A copy, because some losses are views of a tensor as large as the output, which would stay in memory.
        step.losses[microbatch] = loss.detach().reshape(()).clone()
        return loss.reshape(())

    def weights(self, step: Step) -> tuple[float, ...]:
        """The weight of every microbatch's loss in that of the batch."""
        if step.weights is None:
            step.weights = self._weighing.of(step)
        return step.weights

    def added_loss(self, step: Step, stage: int, microbatch: int, added: Sequence[Added]) -> Tensor:
        """The weighted sum of the losses that `add_loss` added in one stage for a microbatch."""
        share = step.microbatches[microbatch].size / step.mean_size
        return self._added.total(added, stage, share)

    def warnings(self, step: Step) -> tuple[str, ...]:
        """Why the loss or gradients of a step are not, or may not be, those of the whole batch."""
        if not step.is_training:
            return self._weighing.doubts if step.losses else ()
        return (*(self._weighing.remarks(step) if step.losses else ()), *self._added.doubts())


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
