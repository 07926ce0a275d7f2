"""The data of one training or evaluation step: its batch, its losses and result, and the state before it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.batches import Microbatch
from penstock.capture import ARITHMETIC_DTYPES, Recording, restore_content
from penstock.ir import Trace
from penstock.loss import LossStep
from penstock.planner import TokenGroup
from penstock.runtime.host_memory import read_scalars
from penstock.runtime.model_part import BufferName
from penstock.runtime.nonfinite import Extremes

NO_LOSS, ONE_LOSS, NAMED_LOSSES = 0.0, 1.0, 2.0
"""kinds of steps: without a loss, with one, with several by name"""


@dataclass
class Step(LossStep):
    """The options of a step; filled with its microbatches when it begins, and with losses and outputs while it runs."""

    microbatches: tuple[Microbatch, ...] = ()
    recordings: tuple[Recording, ...] = ()
    is_training: bool = True
    inputs: tuple[dict[str, Any], ...] = ()
    """the tensors of each microbatch by the names of the model's inputs"""
    leaf_inputs: Sequence[Tensor] = ()
    """tensors of the batch in whose `grad` the step adds gradients"""
    number: int = 0
    """how many steps the Pipeline had run before"""
    seed: int = 0
    """of the random numbers of the step"""
    keeps_outputs: bool = False
    output_dims: Any = None
    """how outputs are merged, see `penstock.runtime.outputs.merge`"""
    scale: float = 1.0
    """factor of loss and gradients that the caller of the step gave"""
    gradient_scale: float = 1.0
    """factor of all gradients: `scale`, times the scale of the GradScaler if there is one"""
    budget_tokens: int | None = None
    """the most padded tokens of a microbatch, if samples are grouped by length"""
    min_recordings: int = 0
    """how often all ranks still have to record the model for this step, if replicas share parameters"""
    mean_size: float = 1.0
    """samples of the batch, averaged over the replicas"""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """by microbatch, on the rank of the last stage"""
    named_losses: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """by microbatch and name, if there are several losses, on the rank of the last stage"""
    weights_by_loss: dict[str, LossStep] = field(default_factory=dict)
    """the weights of each of several losses"""
    added_losses: dict[int, list[Tensor]] = field(default_factory=dict)
    """by microbatch, the losses that `add_loss` added in stages of this process"""
    outputs: dict[int, Any] = field(default_factory=dict)
    """by microbatch, on the rank of the last stage, if they are kept"""
    extremes: Extremes = field(default_factory=Extremes)


@dataclass(frozen=True)
class Result:
    """The loss of the whole batch and of each microbatch, the same on every rank; outputs and trace if asked for."""

    loss: Tensor | None
    """the loss of the whole batch, times the `scale` of the step; None if there is no loss"""
    losses: tuple[Tensor, ...]
    """the loss of each microbatch, not scaled"""
    weights: tuple[float, ...] = ()
    """the factor of each microbatch's loss in `loss`"""
    outputs: Any = None
    """the model's outputs for the whole batch, if asked for"""
    trace: Trace | None = None
    """the recorded times of this step, if asked for"""
    skipped: str = ""
    """why the gradients of this step were dropped; empty if they were not"""
    losses_by_name: dict[str, Tensor] = field(default_factory=dict)
    """each loss of the whole batch, times `scale`, if the model or the loss function returns several; `loss` is their
    sum"""
    weights_by_name: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """the factors of the microbatches for each of several losses"""
    seed: int = 0
    """of the random numbers of this step"""
    groups: tuple[TokenGroup, ...] = ()
    """with `budget_tokens`, the samples and the padded length of each microbatch, in the order in which they ran"""


class LossVote(NamedTuple):
    """The losses of a step as numbers that ranks exchange at its end. Only the rank of the last stage has losses."""

    total: float = 0.0
    """the weighted sum of the losses of the microbatches"""
    added: float = 0.0
    """the sum of the losses that `add_loss` added in stages of this process"""
    kind: float = NO_LOSS
    dtype: float = -1.0
    """index in ARITHMETIC_DTYPES"""
    content: tuple[float, ...] = ()
    """the loss of every microbatch, then the weight of every microbatch"""

    @classmethod
    def of(cls, step: Step) -> "LossVote":
        """The vote of this process after a step."""
        added = 0.0
        if step.added_losses:
            added = step.scale * sum(read_scalars([value for values in step.added_losses.values() for value in values]))
        if not step.losses:
            return cls(added=added)
        losses = torch.stack([step.losses[index] for index in range(len(step.microbatches))])
        values, weights = losses.tolist(), [weight * step.scale for weight in step.weights]
        # A microbatch of weight 0 does not count, even if its loss is NaN.
        total = sum([weights[index] * values[index] for index in step.losses if weights[index]])
        kind, dtype = NAMED_LOSSES if step.weights_by_loss else ONE_LOSS, ARITHMETIC_DTYPES.index(losses.dtype)
        return cls(total, added, kind, float(dtype), (*values, *weights))


class StepSnapshot:
    """Saves the state before a step; afterwards `commit` keeps the results of the step, `restore` undoes it.

    The gradients of `reduced` parameters and of inputs are set aside during the step, because only the gradients that
    the step adds are summed over other ranks, or divided. Other gradients are accumulated in place, as in plain
    training, which gives the same bits; a copy is kept of those that exist.
    """

    def __init__(
        self,
        reduced: Iterable[nn.Parameter],
        parameters: Iterable[nn.Parameter],
        restores: bool,
        buffers: Iterable[BufferName] = (),
    ) -> None:
        """Without `restores` nothing is copied, and a step that fails drops all gradients."""
        unique = dict.fromkeys(reduced)
        self._reduced = tuple(unique)
        self._others = tuple(parameter for parameter in dict.fromkeys(parameters) if parameter not in unique)
        self._buffer_names = tuple(buffers) if restores else ()
        self._restores = restores
        self._set_aside: dict[Tensor, Tensor | None] = {}
        self._gradients: dict[nn.Parameter, Tensor | None] = {}
        """copies of the gradients of other parameters"""
        self._buffers: list[tuple[BufferName, Tensor, Tensor]] = []
        """name, the tensor of that name before the step, and a copy of its values"""
        self._memory: dict[object, Tensor] = {}
        """memory of the copies, reused in every step: allocating would cost more than copying"""

    def take(self, inputs: Sequence[Tensor] = ()) -> None:
        """Save the current state and the gradients of `inputs`; call this before the step."""
        for tensor in dict.fromkeys((*self._reduced, *inputs)):
            self._set_aside[tensor], tensor.grad = tensor.grad, None
        if not self._restores:
            return
        for parameter in self._others:
            gradient = parameter.grad
            self._gradients[parameter] = None if gradient is None else self._copy(parameter, gradient.detach())
        for name in self._buffer_names:
            buffer = getattr(*name)
            self._buffers.append((name, buffer, self._copy(name, buffer.detach())))

    def _copy(self, key: object, tensor: Tensor) -> Tensor:
        memory = self._memory.get(key)
        if memory is None or not _fits(memory, tensor):
            memory = self._memory[key] = tensor.clone()
            return memory
        return memory.copy_(tensor)

    def commit(self) -> None:
        """Keep a successful step: add the gradients that were set aside to those of the step."""
        for tensor, earlier in self._set_aside.items():
            if earlier is not None:
                tensor.grad = earlier if tensor.grad is None else earlier.add_(tensor.grad)
        self._set_aside, self._gradients, self._buffers = {}, {}, []

    def restore(self) -> None:
        """Undo a failed step: restore gradients and buffers to their values before it."""
        for (owner, name), buffer, values in self._buffers:
            restore_content(buffer, values)
            # The model may have assigned another tensor.
            setattr(owner, name, buffer)
        for tensor, earlier in self._set_aside.items():
            tensor.grad = earlier if self._restores else None
        for parameter in self._others:
            copy = self._gradients.get(parameter)
            if copy is None:
                parameter.grad = None
            elif parameter.grad is None or not _fits(copy, parameter.grad):
                parameter.grad = copy.clone()
            else:
                # In place, so that other references to the gradient, such as flat buffers, see the restored values.
                parameter.grad.copy_(copy)
        self._set_aside, self._gradients, self._buffers = {}, {}, []


def _fits(memory: Tensor, tensor: Tensor) -> bool:
    """Whether `tensor` can be copied into `memory` in place."""
    return (
        type(memory) is type(tensor)
        and memory.shape == tensor.shape
        and memory.dtype == tensor.dtype
        and memory.device == tensor.device
        and memory.layout == tensor.layout
        and not tensor.is_sparse
    )
