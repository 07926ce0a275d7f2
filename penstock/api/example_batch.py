"""ExampleBatch: the batch that `plan` is given, and the costs of the microbatches that it may be split into."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.api.arguments import LossFn, check_batch, check_loss_fn, check_split
from penstock.api.measuring import BUDGET_SECONDS, measure, measured_model
from penstock.batches import Batch, BatchSplitter, Microbatch, Split, explain_failure, find_split
from penstock.capture import Captured, Granularity, check_model, find_head, with_loss
from penstock.capture import capture as record_model
from penstock.errors import CaptureError, NoLossError, PenstockWarning, PlanError
from penstock.ir import DeviceSpeed, Graph, Profile, SplitRule
from penstock.planner import Measured, interpolate_profile

_SLOW_SECONDS = 2.0  # if measuring one size of microbatch takes longer than this, no other size is measured


@dataclass(frozen=True)
class ExampleBatch:
    """One batch of a model, from which microbatches of the sizes that a plan may use are split off and measured."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    split: Split | None = None
    loss_fn: LossFn | None = None
    target: Any = None
    """if given, the costs of the loss count"""
    speed: DeviceSpeed | None = None
    """estimate for a device of this speed instead of measuring"""
    profile: Profile | None = None
    """costs of a microbatch of one size that were measured before; None: measure"""
    granularity: Granularity = field(default_factory=Granularity)
    measure_seconds: float = BUDGET_SECONDS
    """for measuring a microbatch of one size, approximately"""
    is_whole: bool = False
    """whether the batch is the only microbatch, so that it need not be split"""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            hint = "penstock.plan(model, args, ranks=..., microbatches=...)"
            raise PlanError("model must be a torch.nn.Module", got=type(self.model).__name__, hint=hint)
        check_model(self.model)
        check_batch(self.args, self.kwargs, PlanError)
        if self.speed is not None and not isinstance(self.speed, DeviceSpeed):
            hint = "penstock.measure_speed(), or penstock.DeviceSpeed(...)"
            raise PlanError("speed must be a DeviceSpeed", got=repr(self.speed), hint=hint)
        if self.profile is not None and not isinstance(self.profile, Profile):
            hint = "penstock.measure(penstock.capture(model, args)), or None to measure here"
            raise PlanError("profile must be a Profile", got=type(self.profile).__name__, hint=hint)
        check_loss_fn(self.model, self.loss_fn)
        check_split(self.split, self.model)

    @cached_property
    def rules(self) -> dict[str, SplitRule]:
        """How the batch is split: as given, and as found for arguments whose shapes leave it open."""
        found = {} if self.is_whole else find_split(self.model, self.args, self.kwargs or {}, self.split)
        return {**found, **(self.split or {})}

    def num_samples(self, most: int) -> int:
        """The number of samples of the batch, at most `most`."""
        # A batch is split into at most as many microbatches as it has samples.
        return len(self._microbatches(most))

    def measured(self, counts: Sequence[int]) -> dict[int, Measured]:
        """The graph and the profile of a microbatch by the number of microbatches, at least for the first number.

        Besides the first, the largest and the smallest number are measured, others are interpolated. With a given
        profile, only the size that it was measured for can be planned.
        """
        if self.profile is not None:
            graphs = {count: self._graph(self.captured(count)) for count in counts}
            matching = {n: graph for n, graph in graphs.items() if graph.fingerprint == self.profile.fingerprint}
            if not matching:
                self.profile.check(graphs[counts[0]])  # raises
            return {count: Measured(graph, self.profile) for count, graph in matching.items()}
        start = time.monotonic()
        models = {counts[0]: self._measured(counts[0])}
        if len(counts) == 1 or time.monotonic() - start > _SLOW_SECONDS:
            return models
        ends = (min(counts), max(counts))
        models |= {count: self._measured(count) for count in ends if count not in models}
        models |= {count: self._interpolated(count, ends, models) for count in counts if count not in models}
        return models

    def of_loss(self, model: nn.Module) -> "ExampleBatch":
        """The same batch for a model that returns the loss; if there is a `loss_fn`, one that takes the target too."""
        if self.loss_fn is None:
            return replace(self, model=model)
        return replace(
            self, model=model, kwargs={**(self.kwargs or {}), "target": self.target}, loss_fn=None, target=None
        )

    def _measured(self, count: int) -> Measured:
        captured = self.captured(count)
        graph = self._graph(captured)
        return Measured(graph, self._profile(captured, graph, count))

    def _profile(self, captured: Captured, graph: Graph, count: int) -> Profile:
        """Measure a microbatch; with a loss function and a target, the loss counts as part of the model's output."""
        if self.loss_fn is None or self.target is None:
            return measure(captured, loss_fn=self.loss_fn, speed=self.speed, budget=self.measure_seconds)
        scored = self.of_loss(with_loss(self.model, self.loss_fn))
        try:
            profile = measure(scored.captured(count), speed=self.speed, budget=self.measure_seconds)
        except (CaptureError, NoLossError) as error:
            # A Pipeline calls the loss as it is, and needs no record of it.
            warnings.warn(f"the loss does not count in the plan: {error}", PenstockWarning, stacklevel=2)
            return replace(self, target=None)._profile(captured, graph, count)
        return profile.with_loss_in_output(graph)

    def _interpolated(self, count: int, ends: tuple[int, int], known: Mapping[int, Measured]) -> Measured:
        """The costs for `count` microbatches from those for fewer and for more, linear in the samples of one."""
        captured = self.captured(count)
        graph, sizes = self._graph(captured), [self._microbatches(each)[0].size for each in (ends[0], count, ends[1])]
        share = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0]) if sizes[2] != sizes[0] else 0.0
        profiles = (known[end].profile for end in ends)
        try:
            return Measured(graph, interpolate_profile(graph, share, *profiles))
        except PlanError:
            # The model takes another path for this size, so its nodes differ.
            return Measured(graph, self._profile(captured, graph, count))

    def _microbatches(self, count: int) -> tuple[Microbatch, ...]:
        splitter = BatchSplitter(self.model.forward, self.rules)
        return splitter.split(Batch(self.args, self.kwargs or {}), count)

    def captured(self, count: int) -> Captured:
        """The model recorded on the first of `count` microbatches."""
        microbatches = self._microbatches(count)
        first, last = microbatches[0], microbatches[-1]
        try:
            captured = record_model(self.model, first.args, first.kwargs, self.granularity)
            if last.size == 1 < first.size and any(isinstance(one, _BatchNorm) for one in self.model.modules()):
                # Batch norm may refuse a single sample, as torch's does: better now than in the first step.
                captured.recording(last.args, last.kwargs)
        except CaptureError as error:
            raise explain_failure(error, self.model.forward, microbatches) from error.__cause__
        return captured

    def output_layer(self, count: int) -> str:
        """The module that makes the logits, or contains their layer."""
        measured = measured_model(self.captured(count), self.loss_fn is not None)
        return find_head(measured.graph, measured.roots)

    def _graph(self, captured: Captured) -> Graph:
        """The graph of a microbatch, with gradients for the loss or, with a loss function, for all outputs."""
        return measured_model(captured, self.loss_fn is not None).graph
