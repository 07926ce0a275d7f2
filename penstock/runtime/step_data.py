"""StepData: what one step works on, and what it brings home."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from penstock.capture import Microbatch
from penstock.runtime.health import Health


class CutBatch(NamedTuple):
    """A batch cut into microbatches, the recording that holds for each, and its tensors by name."""

    microbatches: tuple[Microbatch, ...]
    recordings: tuple[Any, ...]
    named: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Inputs:
    """The microbatches of a step, the recording that holds for each, and its tensors by name."""

    microbatches: tuple[Microbatch, ...]
    recordings: tuple[Any, ...]
    named: tuple[dict[str, Any], ...]
    seed: int
    mean_size: float
    """the samples of the batch, as a mean over the replicas"""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The samples of each microbatch."""
        return tuple(microbatch.size for microbatch in self.microbatches)

    def share(self, microbatch: int) -> float:
        """The samples of a microbatch as a share of all; of those of all replicas together, as the mean over them."""
        return self.microbatches[microbatch].size / self.mean_size


@dataclass
class StepData:
    """The inputs of a step; filled with losses and outputs while it runs."""

    inputs: Inputs
    is_training: bool
    keeps_outputs: bool
    weights: tuple[float, ...] | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    added: dict[int, list[Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    health: Health = field(default_factory=Health)

    def again(self) -> "StepData":
        """The same step before anything of it has run; the weights are known."""
        return StepData(self.inputs, self.is_training, False, self.weights)
