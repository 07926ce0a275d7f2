"""The data of one training or evaluation step, and its result."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.ir import Trace
from penstock.loss import LossStep
from penstock.runtime.health import Extremes


@dataclass
class Step(LossStep):
    """The microbatches of a step; filled with weights, losses and outputs while it runs."""

    inputs: tuple[dict[str, Tensor], ...] = ()
    """the tensors of each microbatch by the names of the model's inputs"""
    keeps_outputs: bool = False
    seed: int = 0
    mean_size: float = 1.0
    """samples of the batch, averaged over the replicas"""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """by microbatch, on the rank of the last stage"""
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
    losses: tuple[Tensor, ...]
    weights: tuple[float, ...] = ()
    """the factor of each microbatch's loss in that of the batch"""
    outputs: Any = None
    trace: Trace | None = None
    skipped: str = ""
    """why the gradients of this step were dropped; empty if they were not"""
