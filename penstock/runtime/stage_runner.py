"""Runs forward, backward and weight gradients of this process's stages on the microbatches of a step."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.capture import call_hook
from penstock.loss import added_with_reductions
from penstock.runtime.health import NonfiniteProbe
from penstock.runtime.loss_head import LossHead
from penstock.runtime.model_part import ModelPart
from penstock.runtime.step import Step
from penstock.runtime.transports import RecvSlot, SendSlot, Tensors
from penstock.stages import StageRun

LOSS, ADDED = "the loss", "added losses"
"""names of the values that backward starts from, beside those that leave a stage"""


class LocalSlot:
    """Values that one stage passes to another stage of the same rank."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: Tensors = ()

    def put(self, tensors: Tensors) -> None:
        """Store the values."""
        self._tensors = tensors

    def take(self) -> Tensors:
        """The values; the slot keeps no reference."""
        tensors, self._tensors = self._tensors, ()
        return tensors

    def clear(self) -> None:
        """Drop the values, after a failure."""
        self._tensors = ()


class ValuesFrom(NamedTuple):
    """Values that a pass takes from another stage."""

    names: tuple[str, ...]
    slot: RecvSlot | LocalSlot


class ValuesTo(NamedTuple):
    """Values that a pass gives to another stage."""

    names: tuple[str, ...]
    slot: SendSlot | LocalSlot


class Pass(NamedTuple):
    """One forward, backward or weight gradient of a stage on a microbatch."""

    stage: int
    microbatch: int
    sources: tuple[ValuesFrom, ...]
    """for a backward in the order in which gradients are added up"""
    targets: tuple[ValuesTo, ...]
    is_split: bool
    """whether backward computes input gradients only, and weight gradients follow later"""


class StageRunner:
    """Runs the passes of this process's stages; `step` is the step that they belong to."""

    def __init__(self, part: ModelPart, last_stage: int, loss_head: LossHead) -> None:
        self._part, self._last_stage, self._loss_head = part, last_stage, loss_head
        self.has_replicas = part.groups.num_replicas > 1
        self.step: Step | None = None
        self.probe: NonfiniteProbe | None = None
        """set while a step is run again to find where NaN or Inf came from"""
        self._runs: dict[tuple[int, int], StageRun] = {}
        """forwards that wait for their backward, by stage and microbatch"""

    def forward(self, own: Pass) -> None:
        """Run a stage on its incoming values, and the loss after the last stage; pass on the outputs."""
        stage, microbatch, step = own.stage, own.microbatch, self.step
        assert step is not None
        incoming: dict[str, Any] = {}
        for names, slot in own.sources:
            incoming.update(zip(names, slot.take(), strict=True))
        recording, inputs = step.recordings[microbatch], step.inputs[microbatch]
        probe = self.probe.start(stage, microbatch, recording.graph, inputs) if self.probe else None
        with added_with_reductions() as added, call_hook(probe.check_call) if probe else nullcontext():
            # Replay mixes all bits of the seed, so neighbouring seeds are as different as any others.
            seed = step.seed + microbatch
            run = StageRun(self._part.stages[stage], recording, inputs, incoming, own.is_split, seed)
        loss = self._loss_head.loss(step, microbatch, run.outputs) if stage == self._last_stage else None
        if loss is not None:
            run.add_root(LOSS, loss)
        # A loss of weight 0, of a microbatch without any label that counts, is 0/0: it is not checked.
        if step.is_training and (loss is None or self._loss_head.weights(step)[microbatch]):
            step.extremes.add(stage, (*run.outputs.values(), loss))
            if probe is not None:
                probe.end(run.outputs.values(), loss)
        if added:
            total = self._loss_head.added_loss(step, stage, microbatch, added)
            step.added.setdefault(microbatch, []).append(total.detach())
            run.add_root(ADDED, total)
        if step.is_training:
            self._runs[stage, microbatch] = run
        outputs = run.take_outputs()
        for names, target in own.targets:
            target.put([outputs[name] for name in names])

    def backward(self, own: Pass) -> None:
        """Run the backward of a stage, whole or for the inputs only; pass back the gradients of its incoming values."""
        stage, microbatch, step = own.stage, own.microbatch, self.step
        assert step is not None
        if stage in self._part.sharded.modules:
            self._part.sharded.before_backward(stage)
        gradients: dict[str, Tensor | None] = {}
        if microbatch in step.added:
            gradients[ADDED] = torch.full_like(step.added[microbatch][0], self._loss_head.scale)
        if stage == self._last_stage:
            weight = self._loss_head.weights(step)[microbatch]
            # Backward through a loss of weight 0 could give 0 * NaN: it is left out instead.
            if weight:
                gradients[LOSS] = torch.full_like(step.losses[microbatch], weight * self._loss_head.scale)
        for names, slot in own.sources:
            for name, gradient in zip(names, slot.take(), strict=True):
                if gradient is not None:
                    sum_so_far = gradients.get(name)
                    gradients[name] = gradient if sum_so_far is None else sum_so_far + gradient
        if own.is_split:
            returned = self._runs[stage, microbatch].input_grad(gradients)
        else:
            returned = self._runs.pop((stage, microbatch)).backward(gradients)
        for names, target in own.targets:
            target.put([returned.get(name) for name in names])

    def weight_grad(self, own: Pass) -> None:
        """Compute the weight gradients of a split backward; a no-op if backward was not split."""
        run = self._runs.pop((own.stage, own.microbatch), None)
        if run is not None:
            run.weight_grad()

    def can_split(self, stage: int) -> bool:
        """Whether backward may be split: not in a sharded stage, as FSDP reduces gradients at the end of backward."""
        return stage not in self._part.sharded.modules

    def reduce(self, stage: int) -> None:
        """Start averaging the gradients of the stage over the replicas, after its last microbatch."""
        self._part.replicas.start(stage)

    def unshard(self, stage: int) -> None:
        """Gather the parameters of the stage."""
        self._part.sharded.unshard(stage)

    def reshard(self, stage: int) -> None:
        """Keep only this rank's shard of the stage's parameters."""
        self._part.sharded.reshard(stage)

    def clear(self) -> None:
        """Drop the forwards that a failed step has left."""
        self._runs.clear()
