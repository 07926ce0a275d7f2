"""The loss of each microbatch after the last stage, its weight in the loss of the batch, and warnings about both."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.capture import Captured, Recording
from penstock.errors import PenstockWarning, RunError
from penstock.ir import Partition, transform
from penstock.loss import Added, AddedLosses, LossWeights
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.scaler import GradScaler
from penstock.runtime.step import Step

_TRAINING = "gradients are those of a loop over the microbatches"
_EVALUATION = "the loss is the mean over the microbatches"
_NUM_NAMED = 3


class LossHead:
    """Computes losses with the user's loss function, or takes the loss that the model returns."""

    def __init__(
        self, captured: Captured, loss_weights: LossWeights, partition: Partition, scaler: GradScaler | None
    ) -> None:
        self._captured, self._loss_weights, self.scaler = captured, loss_weights, scaler
        self._partition, self._added = partition, AddedLosses(captured)

    @property
    def has_loss_fn(self) -> bool:
        """Whether the loss is computed by a loss function, and not by the model."""
        return self._loss_weights.has_function

    @property
    def reduction(self) -> str:
        """How the loss is averaged over samples; empty if that is not known yet."""
        return self._loss_weights.reduction

    @property
    def scale(self) -> float:
        """The factor of all gradients, set by the scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def roots(self, recording: Recording, is_training: bool) -> tuple[str, ...]:
        """The values that the loss is computed from; empty if an evaluated model returns no loss."""
        if self._loss_weights.has_function:
            return tuple(recording.graph.outputs)
        try:
            return (self._loss_weights.loss_name(recording),)
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
        if self._loss_weights.has_function:
            if not step.is_training and own.target is None:
                return None
            loss = self._loss_weights.loss(step, microbatch, output)
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
        # A copy, because some losses are views of a tensor as large as the output, which would stay in memory.
        step.losses[microbatch] = loss.detach().reshape(()).clone()
        return loss.reshape(())

    def weights(self, step: Step) -> tuple[float, ...]:
        """The weight of every microbatch's loss in that of the batch."""
        return self._loss_weights.weights(step)

    def added_loss(self, step: Step, stage: int, microbatch: int, added: Sequence[Added]) -> Tensor:
        """The weighted sum of the losses that `add_loss` added in one stage for a microbatch."""
        runs = self._partition.runs(step.recordings[microbatch].graph)
        nodes = {node.name for node in runs[stage]}
        share = step.microbatches[microbatch].size / step.mean_size
        return self._added.total(step, microbatch, stage, nodes, added, share)

    def warnings(self, step: Step) -> tuple[str, ...]:
        """Why the loss or gradients of a step are not, or may not be, those of the whole batch."""
        found = self._loss_weights.warnings(step) if step.losses else ()
        return (*found, *self._added.warnings) if step.is_training else found


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class MicrobatchWarning(PenstockWarning):
    """The loss or gradients of microbatches are not, or if not `is_certain` may not be, those of the whole batch."""

    def __init__(self, cause: str, is_certain: bool = True, is_training: bool = True) -> None:
        super().__init__(f"{cause}; {_TRAINING if is_training else _EVALUATION}")
        self.cause, self.is_certain = cause, is_certain


class StepWarnings:
    """Collects the warnings of all ranks after a step; the first rank issues each of them once."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._issued: dict[str, bool] = {}
        """causes, and whether they were issued for training; those issued for an evaluation are then issued again"""
        self._num_steps = 0

    def new(
        self, step: Step, loss_head: LossHead, parameters: Callable[[], Mapping[str, Tensor]]
    ) -> list[tuple[str, bool]]:
        """The causes found on this rank that were not issued yet, and whether each is certain.

        Parameters are checked for hooks in the 1st, 2nd, 4th, 8th ... step.
        """
        found = [(cause, True) for cause in loss_head.warnings(step)]
        self._num_steps += step.is_training
        if step.is_training and not self._num_steps & (self._num_steps - 1):
            found += [(cause, False) for cause in _hook_causes(parameters())]
        return [
            one
            for one in dict.fromkeys(found)
            if one[0] not in self._issued or (step.is_training and not self._issued[one[0]])
        ]

    def issue(self, own: list[tuple[str, bool]], is_training: bool) -> None:
        """Gather the new warnings of all ranks and issue them on the first; all ranks call this."""
        groups = self._groups
        texts = [
            groups.broadcast_text(json.dumps(own), rank) for rank in range(1 if groups.is_local else groups.num_ranks)
        ]
        whole = json.dumps([one for text in texts for one in json.loads(text)])
        replicas = [groups.broadcast_text_to_replicas(whole, replica) for replica in range(groups.num_replicas)]
        for cause, is_certain in dict.fromkeys(tuple(one) for text in replicas for one in json.loads(text)):
            self._issued[cause] = is_training
            if groups.is_first:
                # Points at the user's call of step or eval.
                warnings.warn(MicrobatchWarning(cause, is_certain, is_training), stacklevel=5)


def _hook_causes(parameters: Mapping[str, Tensor]) -> Iterator[str]:
    names = [name for name, parameter in parameters.items() if _has_user_hook(parameter)]
    if names:
        more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        yield (
            "hooks on parameters are called once per microbatch, so that a nonlinear hook, such as clamping, "
            f"differs from one call for the whole batch: {', '.join(names[:_NUM_NAMED])}{more}"
        )


def _has_user_hook(parameter: Tensor) -> bool:
    hooks = (*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values())
    # torch's own sharding registers hooks too.
    return any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
