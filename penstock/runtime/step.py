"""The data of one training or evaluation step: its batch, the values computed from it, and its result."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from penstock.batches import Microbatch
from penstock.capture import Recording
from penstock.ir import Trace
from penstock.loss import LossStep
from penstock.planner import TokenGroup
from penstock.runtime.health import Extremes


class SplitBatch(NamedTuple):
    """A batch as microbatches, with the recording and the named input tensors of each."""

    microbatches: tuple[Microbatch, ...]
    recordings: tuple[Recording, ...]
    inputs: tuple[dict[str, Any], ...]


@dataclass
class Step(LossStep):
    """The microbatches of a step; filled with weights, losses and outputs while it runs."""

    inputs: tuple[dict[str, Tensor], ...] = ()
    """the tensors of each microbatch by the names of the model's inputs"""
    keeps_outputs: bool = False
    output_dims: Any = None
    """how outputs are merged, see `penstock.runtime.outputs.merge`"""
    seed: int = 0
    mean_size: float = 1.0
    """samples of the batch, averaged over the replicas"""
    scale: float = 1.0
    """factor of loss and gradients that the caller of the step gave"""
    gradient_scale: float = 1.0
    """factor of all gradients: `scale`, times the scale of the GradScaler if there is one"""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """by microbatch, on the rank of the last stage"""
    named_losses: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """by microbatch and name, if there are several losses, on the rank of the last stage"""
    weights_by_loss: dict[str, LossStep] = field(default_factory=dict)
    """the weights of each of several losses"""
    added: dict[int, list[Tensor]] = field(default_factory=dict)
    """by microbatch, the losses that `add_loss` added in stages of this process"""
    outputs: dict[int, Any] = field(default_factory=dict)
    """by microbatch, on the rank of the last stage, if they are kept"""
    extremes: Extremes = field(default_factory=Extremes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of samples of each microbatch."""
        return tuple(microbatch.size for microbatch in self.microbatches)


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
