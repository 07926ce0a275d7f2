"""The versions of a stage's weights in an asynchronous pipeline: the present one, stashed ones and predicted ones.

The parameters always hold the present weights, except while a pass of a microbatch runs: then they hold the version
that was chosen in its forward. Parameters stay the same objects; only their `data` is exchanged.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter

from penstock.errors import RunError

_is_updating = False
"""whether an optimizer is being stepped by `StageWeights.update`"""
_PREDICTED = 'torch.optim.SGD(params, lr, momentum=0.9), Adam or AdamW; or staleness="stash"'


@dataclass(eq=False)
class Version:
    """One set of weights; `number` counts the updates since the stream began, `ahead` those that were predicted."""

    number: int
    ahead: int
    tensors: tuple[Tensor, ...]
    num_users: int = 0
    """microbatches between their forward and the end of their backward"""


class StageWeights:
    """The weights of one stage, and which version each microbatch uses."""

    def __init__(
        self,
        stage_parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        staleness: str,
    ) -> None:
        self._parameters = tuple(p for p in dict.fromkeys(stage_parameters) if p.requires_grad)
        self._optimizer, self._staleness = optimizer, staleness
        own = set(self._parameters)
        self._others = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
        """parameters of other stages that the same optimizer updates, if all stages are in this process"""
        self.start()

    def start(self) -> None:
        """Begin a stream with the weights that the parameters have now, and without gradients."""
        self._present = Version(0, 0, self._data())
        self._previous: Version | None = None
        """with "2bw", the version before the present one"""
        self._predicted: dict[tuple[int, int], Version] = {}
        """by the number of the version that a prediction starts from, and the updates that it is ahead"""
        self._kept: set[Version] = set()
        """versions other than the present one that are in use"""
        self.stashed_versions = 0
        """the most versions other than the present one that were kept at a time since the stream began"""
        self._gradients: list[tuple[Tensor | None, int]] = []
        """those of batches in flight after the last call, and how often they had been written"""
        for parameter in self._parameters:
            parameter.grad = None

    def check_gradients(self) -> None:
        """Raise a RunError if gradients of batches in flight were changed since `note_gradients`."""
        for parameter, (gradient, count) in zip(self._parameters, self._gradients, strict=False):
            if parameter.grad is not gradient or (gradient is not None and gradient._version != count):
                raise RunError(
                    "gradients of batches in flight were changed between two steps of an asynchronous pipeline",
                    hint="leave out zero_grad(), clip_grad_norm_() and other backwards, or call pipe.drain() before",
                )

    def note_gradients(self) -> None:
        """Remember the gradients of batches in flight at the end of a call."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._gradients = [(each, 0 if each is None else each._version) for each in gradients]

    def acquire(self, batch_number: int) -> Version:
        """The version for the forward and backward of a microbatch of this batch of the stream."""
        version = present = self._present
        ahead = batch_number - present.number
        if self._staleness == "2bw":
            version = present if present.number == max(batch_number - 1, 0) else self._previous
        elif self._staleness == "predict" and ahead:
            key = (present.number, ahead)
            if key not in self._predicted:
                tensors = predict(self._optimizer, self._parameters, present.tensors, ahead)
                self._predicted[key] = Version(*key, tensors)
            version = self._predicted[key]
        version.num_users += 1
        self._keep(version)
        return version

    def release(self, version: Version) -> None:
        """End the use of a version, after the backward of a microbatch."""
        version.num_users -= 1
        if not version.num_users:
            self._predicted.pop((version.number, version.ahead), None)
            if version is not self._previous:
                self._kept.discard(version)

    def _keep(self, version: Version) -> None:
        if version is not self._present:
            self._kept.add(version)
            self.stashed_versions = max(self.stashed_versions, len(self._kept))

    @contextmanager
    def using(self, version: Version) -> Iterator[None]:
        """Run the body with the parameters at a version."""
        if version is self._present:
            yield
            return
        self._set_data(version.tensors)
        try:
            yield
        finally:
            self._set_data(self._present.tensors)

    def update(self) -> None:
        """Apply the gradients of a batch to the present weights, and clear the gradients.

        A version that is still used keeps its memory: the parameters move to a copy before they are updated.
        """
        old = self._present
        if self._previous is not None and not self._previous.num_users:
            self._kept.discard(self._previous)
        if old.num_users or self._staleness == "2bw":
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.data = parameter.data.clone()
        # The optimizer must not apply the unfinished gradients of other stages.
        aside = [parameter.grad for parameter in self._others]
        for parameter in self._others:
            parameter.grad = None
        # Forwards in flight have tensors of the old memory saved for backward. The optimizer does not write them, as
        # the parameters have moved above. But autograd counts the writes to a Parameter, whatever its memory, and would
        # raise "modified by an inplace operation": so the count is kept.
        global _is_updating
        _is_updating = True
        try:
            with preserve_version_counter(self._parameters):
                self._optimizer.step()
        finally:
            _is_updating = False
        for parameter, gradient in zip(self._others, aside, strict=True):
            parameter.grad = gradient
        for parameter in self._parameters:
            parameter.grad = None
        self._present = Version(old.number + 1, 0, self._data())
        if self._staleness == "2bw":
            self._previous = old
        if old.num_users or self._staleness == "2bw":
            self._keep(old)

    def _data(self) -> tuple[Tensor, ...]:
        return tuple(parameter.data for parameter in self._parameters)

    def _set_data(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor

    def restore(self) -> None:
        """Drop all versions but the present one, after a failure."""
        self._set_data(self._present.tensors)
        self.start()


def check_predicted(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose next updates cannot be predicted."""
    problem = ""
    if isinstance(optimizer, torch.optim.SGD):
        if not all(group["momentum"] for group in optimizer.param_groups):
            problem = 'with staleness="predict" SGD must have momentum'
    elif not isinstance(optimizer, torch.optim.Adam):  # torch's AdamW is an Adam
        problem = 'with staleness="predict" the optimizer must be SGD, Adam or AdamW'
    elif any(group["amsgrad"] for group in optimizer.param_groups):
        problem = 'with staleness="predict" amsgrad must be False'
    if not problem and any(group["maximize"] for group in optimizer.param_groups):
        problem = 'with staleness="predict" maximize must be False'
    if problem:
        raise RunError(problem, optimizer=type(optimizer).__name__, hint=_PREDICTED)


@torch.no_grad()
def predict(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], weights: Sequence[Tensor], steps: int
) -> tuple[Tensor, ...]:
    """Predict the weights after `steps` further updates, assuming that the gradients of the loss are zero.

    Weights move by momentum, which decays, and by weight decay. The second moment of Adam is kept. A parameter that has
    no momentum yet, or is not in the optimizer, is not moved.
    """
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    found = []
    for parameter, weight in zip(parameters, weights, strict=True):
        group, state = groups.get(parameter), optimizer.state.get(parameter, {})
        if group is None:
            found.append(weight)
        elif state.get("momentum_buffer") is None and "exp_avg" not in state:
            # Copied, because the next update writes into the present weights.
            found.append(weight.clone())
        elif "exp_avg" in state:
            found.append(_adam(group, state, weight, steps))
        else:
            found.append(_sgd(group, state, weight, steps))
    return tuple(found)


def _sgd(group: dict[str, Any], state: dict[str, Any], weight: Tensor, steps: int) -> Tensor:
    """The updates of torch.optim.SGD with zero gradients."""
    rate, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
    weight, buffer = weight.clone(), state["momentum_buffer"]
    for _ in range(steps):
        buffer = buffer * momentum
        if decay:
            gradient = weight * decay
            buffer = buffer.add(gradient, alpha=1 - group["dampening"])
        direction = buffer
        if group["nesterov"]:
            direction = buffer * momentum
            direction = direction.add(gradient) if decay else direction
        weight.add_(direction, alpha=-rate)
    return weight


def _adam(group: dict[str, Any], state: dict[str, Any], weight: Tensor, steps: int) -> Tensor:
    """The updates of torch.optim.Adam or AdamW with zero gradients and a constant second moment."""
    rate, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), group["weight_decay"]
    weight, mean, number = weight.clone(), state["exp_avg"], float(state["step"])
    root = state["exp_avg_sq"].sqrt()
    for step in range(1, steps + 1):
        mean = mean * beta1
        if decay and group["decoupled_weight_decay"]:
            weight.mul_(1 - rate * decay)
        elif decay:
            mean = mean.add(weight, alpha=(1 - beta1) * decay)
        denominator = (root / math.sqrt(1 - beta2 ** (number + step))).add_(group["eps"])
        weight.addcdiv_(mean, denominator, value=-rate / (1 - beta1 ** (number + step)))
    return weight


def refuse_other_steps(optimizer: torch.optim.Optimizer) -> None:
    """Make `optimizer.step()` raise a RunError, except inside `StageWeights.update`."""

    def check_step(*_: Any) -> None:
        if not _is_updating:
            raise RunError(
                "the optimizer of an asynchronous pipeline must not be stepped outside of pipe.step",
                hint="leave out optimizer.step() and zero_grad()",
            )

    optimizer.register_step_pre_hook(check_step)
