"""The loss of each microbatch after the last stage, its weight in the loss of the batch, and warnings about both."""

import json
import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.capture import ARITHMETIC_DTYPES, Captured, Recording
from penstock.errors import PenstockWarning, RunError
from penstock.ir import Partition, listed, map_leaves
from penstock.loss import SINGLE, Added, AddedLosses, LossStep, LossWeights, agree_on_names
from penstock.runtime.model_part import ModelPart
from penstock.runtime.scaler import GradScaler
from penstock.runtime.step import Step
from penstock.runtime.tensor_parallel import full_tensor

_TRAINING_EFFECT = "gradients are those of a loop over the microbatches"
_EVALUATION_EFFECT = "the loss is the mean over the microbatches"
_HOOKS_PER_MICROBATCH = (
    "hooks on parameters are called once per microbatch, so that a nonlinear hook, such as clamping, differs from one "
    "call for the whole batch"
)


class LossHead:
    """Computes losses with the user's loss function, or takes the loss that the model returns."""

    def __init__(
        self, captured: Captured, loss_weights: LossWeights, partition: Partition, scaler: GradScaler | None
    ) -> None:
        self._captured, self._loss_weights, self.scaler = captured, loss_weights, scaler
        self._partition, self._added = partition, AddedLosses(captured)
        self.has_loss_fn = loss_weights.has_function
        """whether the loss is computed by a loss function, and not by the model"""
        self._names: tuple[str, ...] = ()
        """the names of the losses of the last step, if there are several"""

    @property
    def reduction(self) -> str:
        """How the loss, or each of several, is averaged over samples; empty if that is not known yet."""
        reductions = {name: self._loss_weights.by_name(name).reduction for name in self._names}
        text = ", ".join(f"{name}: {reduction}" for name, reduction in reductions.items())
        return text or self._loss_weights.reduction

    def roots(self, recording: Recording, is_training: bool) -> tuple[str, ...]:
        """The values that the loss is computed from; empty if an evaluated model returns no loss."""
        if self.has_loss_fn:
            return tuple(recording.graph.outputs)
        try:
            return tuple(self._loss_weights.loss_values(recording).values())
        except RunError:
            if is_training:
                raise
            return ()

    def loss(self, step: Step, microbatch: int, stage_outputs: dict[str, Any]) -> Tensor | None:
        """Compute and store the loss of a microbatch; None if an evaluation has none.

        The first loss of a step also finds the weights of all its microbatches, and stores them in the step.
        """
        recording, target = step.recordings[microbatch], step.microbatches[microbatch].target
        values = {**step.inputs[microbatch], **stage_outputs}
        output = self._captured.output(recording, values)
        if step.keeps_outputs:
            step.outputs[microbatch] = map_leaves(output, _detached)
        if self.has_loss_fn:
            if not step.is_training and target is None:
                return None
            losses = self._loss_weights.losses(output, target)
        else:
            if not self.roots(recording, step.is_training):
                return None
            losses = {name: values[value] for name, value in self._loss_weights.loss_values(recording).items()}
        size = step.microbatches[microbatch].size
        losses = {name: checked_loss(name, loss, size) for name, loss in losses.items()}
        if SINGLE in losses:
            loss = losses[SINGLE]
            self._loss_weights.weigh(step, microbatch, output, loss)
        else:
            loss = self._sum_of_losses(step, microbatch, output, losses)
        if step.is_training and not loss.requires_grad:
            raise no_gradient_error()
        # A copy, because some losses are views of a tensor as large as the output, which would stay in memory.
        step.losses[microbatch] = loss.detach().clone()
        return loss

    def _sum_of_losses(self, step: Step, microbatch: int, output: Any, losses: Mapping[str, Tensor]) -> Tensor:
        """The sum of several losses of a microbatch; stores each of them, and finds the weights of the step.

        If the losses have different weights, the sum is weighted already, and the weight of the microbatch is 1.
        """
        if not step.weights_by_loss:
            agree_on_names(self._loss_weights.replicas, losses)
            self._names = tuple(losses)
            step.weights_by_loss = {
                name: LossStep(step.microbatches, step.recordings, step.is_training) for name in losses
            }
        elif losses.keys() != step.weights_by_loss.keys():
            raise RunError(
                "all microbatches must have losses of the same names",
                names=", ".join(losses),
                others=", ".join(step.weights_by_loss),
                hint="a loss of 0 for a microbatch that does not have it: (0 * output).sum()",
            )
        step.named_losses[microbatch] = {name: loss.detach().clone() for name, loss in losses.items()}
        for name, loss in losses.items():
            loss_step = step.weights_by_loss[name]
            self._loss_weights.by_name(name).weigh(loss_step, microbatch, output, loss)
            if loss_step.loss_problem and not step.loss_problem:
                step.loss_problem = f"{name}: {loss_step.loss_problem}"
        weights = {name: loss_step.weights or () for name, loss_step in step.weights_by_loss.items()}
        if len(set(weights.values())) == 1:
            step.weights = next(iter(weights.values()))
            return reduce(torch.add, losses.values())
        step.weights = tuple(float(any(column)) for column in zip(*weights.values(), strict=True))
        # A loss of weight 0 may be NaN, and is left out.
        weighted = [loss * weights[name][microbatch] for name, loss in losses.items() if weights[name][microbatch]]
        return reduce(torch.add, weighted or losses.values())

    def output_weights(self, step: Step) -> tuple[Sequence[float] | None, dict[str, Sequence[float]]]:
        """The weights of scalars among the outputs, and those of the values that are losses of the model, by value.

        Without a loss, or with several that have different weights, other scalars have no weights.
        """
        if not step.losses:
            return None, {}
        steps = step.weights_by_loss or {SINGLE: step}
        weights = {name: loss_step.weights or () for name, loss_step in steps.items()}
        usual = next(iter(weights.values())) if len(set(weights.values())) == 1 else None
        if self.has_loss_fn:
            return usual, {}
        values = self._loss_weights.loss_values(step.recordings[0])
        return usual, {value: weights[name] for name, value in values.items()}

    def added_loss(self, step: Step, stage: int, microbatch: int, added: Sequence[Added]) -> Tensor:
        """The weighted sum of the losses that `add_loss` added in one stage for a microbatch."""
        runs = self._partition.runs(step.recordings[microbatch].graph)
        nodes = {node.name for node in runs[stage]}
        return self._added.total(step, microbatch, stage, nodes, added, step.mean_size)

    def warnings(self, step: Step) -> tuple[str, ...]:
        """Why the loss or gradients of a step are not, or may not be, those of the whole batch."""
        causes = self._loss_weights.warnings(step) if step.losses else ()
        return (*causes, *self._added.warnings) if step.is_training else causes


def checked_loss(name: str, loss: Any, microbatch_size: int) -> Tensor:
    """A loss as a scalar; raises a RunError if it is not one number with a dtype of `ARITHMETIC_DTYPES`."""
    which = {"loss": name} if name else {}
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        hint = "a mean or a sum, without .item(); several losses as a dict of such tensors"
        raise RunError(
            "a loss must be one number in a tensor", **which, got=got, microbatch_size=microbatch_size, hint=hint
        )
    if loss.dtype not in ARITHMETIC_DTYPES:
        problem = "a loss must be a floating-point number of 16 bits or more"
        raise RunError(problem, **which, got=loss.dtype, hint="loss.float()")
    # In a tensor-parallel stage each rank may have a shard or an addend of the loss.
    scalar = loss if type(loss) is Tensor else full_tensor(loss)
    return scalar if scalar.dim() == 0 else scalar.reshape(())


def no_gradient_error() -> RunError:
    """The error for a loss that backward cannot start from."""
    if torch.is_grad_enabled():
        hint = "unfreeze a parameter, or use eval"
    else:
        hint = "call step outside of torch.no_grad()"
    return RunError("the loss does not depend on anything that requires a gradient", hint=hint)


def _detached(leaf: object) -> object:
    return full_tensor(leaf.detach()) if isinstance(leaf, Tensor) else leaf


class MicrobatchWarning(PenstockWarning):
    """The loss or gradients of a step are not those of the whole batch, or may not be if `is_certain` is False."""

    def __init__(self, cause: str, is_certain: bool = True, is_training: bool = True) -> None:
        # As its arguments, so that a copy made from them, as in another process, is the same warning.
        super().__init__(cause, is_certain, is_training)
        self.cause, self.is_certain, self.is_training = cause, is_certain, is_training

    def __str__(self) -> str:
        return f"{self.cause}; {_TRAINING_EFFECT if self.is_training else _EVALUATION_EFFECT}"


class WarningCause(NamedTuple):
    """Why a step may differ from one of the whole batch, and the parameters of this rank that it concerns, if any."""

    text: str
    is_certain: bool
    parameters: tuple[str, ...] = ()


class StepWarnings:
    """Collects the warnings of all ranks after a step; the first rank issues each of them once."""

    def __init__(self, model_part: ModelPart, loss_head: LossHead) -> None:
        self._model_part, self._loss_head = model_part, loss_head
        self._issued: dict[str, bool] = {}
        """by text, whether it was issued for training; one issued for evaluation only is issued again in training"""
        self._num_steps = 0

    def find_new(self, step: Step) -> list[WarningCause]:
        """The causes found on this rank that were not issued yet.

        Parameters are checked for hooks in the 1st, 2nd, 4th, 8th ... step.
        """
        causes = [WarningCause(text, True) for text in self._loss_head.warnings(step)]
        self._num_steps += step.is_training
        if step.is_training and not self._num_steps & (self._num_steps - 1):
            parameters = self._model_part.parameters.items()
            hooked = tuple(name for name, parameter in parameters if _has_user_hook(parameter))
            if hooked:
                causes.append(WarningCause(_HOOKS_PER_MICROBATCH, False, hooked))
        return [
            cause
            for cause in dict.fromkeys(causes)
            if cause.text not in self._issued or (step.is_training and not self._issued[cause.text])
        ]

    def issue(self, new_causes: list[WarningCause], is_training: bool) -> None:
        """Gather the new warnings of all ranks and issue them on the first; all ranks call this."""
        groups = self._model_part.groups
        texts = groups.gather_texts_of_all(json.dumps(new_causes))
        parameters: dict[tuple[str, bool], dict[str, None]] = {}
        for text, is_certain, names in (cause for causes in texts for cause in json.loads(causes)):
            parameters.setdefault((text, is_certain), {}).update(dict.fromkeys(names))
        for (text, is_certain), names in parameters.items():
            self._issued[text] = is_training
            if groups.is_first:
                cause = f"{text}: {listed(list(names))}" if names else text
                # Points at the user's call of step or eval.
                warnings.warn(MicrobatchWarning(cause, is_certain, is_training), stacklevel=5)


def _has_user_hook(parameter: Tensor) -> bool:
    hooks = (*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values())
    # torch's own sharding registers hooks too.
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
