"""Examples: a model recorded and measured on microbatches of the sizes that a plan may use."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.api.arguments import check_loss_fn, check_split
from penstock.api.measuring import measure
from penstock.capture import Captured, Microbatch, split_batch
from penstock.capture import capture as record_model
from penstock.errors import PlanError
from penstock.ir import DeviceSpeed, Graph, Profile
from penstock.planner import Measured, interpolate_profile
from penstock.runtime import Solo

LossFn = Callable[[Any, Any], Tensor]
_PATIENCE_SECONDS = 2.0
"""if one size takes longer than this, no other is looked at"""


@dataclass(frozen=True)
class Examples:
    """One batch of a model, from which microbatches of any size are cut."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    split: Mapping[str, int | None] | None = None
    loss_fn: LossFn | None = None
    speed: DeviceSpeed | None = None
    """of the device that seconds are estimated for, in place of measuring"""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            hint = "penstock.plan(model, args, ranks=..., microbatches=...)"
            raise PlanError("a plan needs a torch.nn.Module", given=type(self.model).__name__, hint=hint)
        if not isinstance(self.args, list | tuple):
            given = type(self.args).__name__
            raise PlanError("args is a tuple of what the model is called with", given=given, hint="(x,)")
        if self.kwargs is not None and not isinstance(self.kwargs, Mapping):
            given = type(self.kwargs).__name__
            raise PlanError("kwargs are arguments of the model by name", given=given, hint='{"mask": mask}')
        if self.speed is not None and not isinstance(self.speed, DeviceSpeed):
            hint = "penstock.measure_speed(), or penstock.DeviceSpeed(...)"
            raise PlanError("speed is a DeviceSpeed", given=repr(self.speed), hint=hint)
        check_loss_fn(self.model, self.loss_fn)
        check_split(self.split, self.model)

    def measured(self, counts: Sequence[int], profile: Profile | None) -> dict[int, Measured]:
        """The model for each number of microbatches; the first of them in any case.

        Beside the first, the largest and the smallest are measured, and those between are told from both. With a
        profile of the user's own only the size that it was measured for can be planned.
        """
        if profile is not None:
            return self._of_profile(counts, profile)
        start = time.monotonic()
        found = {counts[0]: self._measured(counts[0])}
        if len(counts) == 1 or time.monotonic() - start > _PATIENCE_SECONDS:
            return found
        ends = (min(counts), max(counts))
        found |= {count: self._measured(count) for count in ends if count not in found}
        found |= {count: self._between(count, ends, found) for count in counts if count not in found}
        return found

    def _measured(self, count: int) -> Measured:
        captured = self._captured(count)
        return Measured(self._graph(captured), measure(captured, loss_fn=self.loss_fn, speed=self.speed))

    def _between(self, count: int, ends: tuple[int, int], known: Mapping[int, Measured]) -> Measured:
        captured = self._captured(count)
        graph, sizes = self._graph(captured), [self._first(each).size for each in (ends[0], count, ends[1])]
        share = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0]) if sizes[2] != sizes[0] else 0.0
        one, other = (known[end].profile for end in ends)
        try:
            return Measured(graph, interpolate_profile(graph, share, one, other))
        except PlanError:
            # Another size takes another way through the model.
            return Measured(graph, measure(captured, loss_fn=self.loss_fn, speed=self.speed))

    def _of_profile(self, counts: Sequence[int], profile: Profile) -> dict[int, Measured]:
        if not isinstance(profile, Profile):
            hint = "penstock.measure(penstock.capture(model, args)), or None to measure here"
            raise PlanError("profile is a Profile", given=type(profile).__name__, hint=hint)
        graphs = {count: self._graph(self._captured(count)) for count in counts}
        found = {count: graph for count, graph in graphs.items() if graph.fingerprint == profile.fingerprint}
        if not found:
            profile.check(graphs[counts[0]])
        return {count: Measured(graph, profile) for count, graph in found.items()}

    def _first(self, count: int) -> Microbatch:
        return split_batch(self.model.forward, tuple(self.args), dict(self.kwargs or {}), None, count, self.split)[0]

    def _captured(self, count: int) -> Captured:
        first = self._first(count)
        return record_model(self.model, first.args, first.kwargs)

    def _graph(self, captured: Captured) -> Graph:
        """The graph of a microbatch; gradients return of what the loss is made of, all outputs for a loss function."""
        return Solo.of(captured, self.loss_fn is not None).graph

    def num_samples(self, most: int) -> int:
        """How many samples the batch has, or the most that are of interest."""
        return len(split_batch(self.model.forward, tuple(self.args), dict(self.kwargs or {}), None, most, self.split))
