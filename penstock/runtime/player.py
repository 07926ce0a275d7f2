"""Player: runs the stages of this process for the runtime, on the load of the current step."""

from typing import Any

import torch
from torch import Tensor

from penstock.capture import call_hook
from penstock.runtime.adding import added_with_reductions
from penstock.runtime.loss_head import LossHead
from penstock.runtime.model_part import ModelPart
from penstock.runtime.step_data import StepData
from penstock.runtime.witness import Witness
from penstock.stages import StageRun

LOSS, ADDED = "the loss", "added losses"


class Player:
    """Which stage, inputs, recording, loss and random numbers a (stage, microbatch) means."""

    def __init__(self, part: ModelPart, last: int, ending: LossHead) -> None:
        self._part, self._last, self._ending = part, last, ending
        self.load: StepData | None = None
        self.witness: Witness | None = None
        """who looks at everything, where a step is run once more to see what went wrong"""

    def forward(self, stage: int, microbatch: int, incoming: dict[str, Any], is_split: bool) -> StageRun:
        """One forward of a stage; on the last one also the loss."""
        load = self._loaded
        inputs = load.inputs
        # Whoever draws random numbers mixes all bits of the seed: neighbours are as different as any.
        seed = inputs.seed + microbatch
        own, recording, named = self._part.stages[stage], inputs.recordings[microbatch], inputs.named[microbatch]
        sight = self.witness.sight(stage, microbatch, recording.graph, named) if self.witness else None
        with added_with_reductions() as added, call_hook(sight.see if sight else None):
            passage = StageRun(own, recording, named, incoming, is_split, seed)
        loss = self._ending.finish(load, microbatch, passage.outputs) if stage == self._last else None
        if loss is not None:
            passage.add_root(LOSS, loss)
        # Without any label that counts a loss is 0/0, and has no say.
        if load.is_training and (loss is None or self._ending.weights(load)[microbatch]):
            load.health.look(stage, (*passage.outputs.values(), loss))
            if sight is not None:
                sight.end(passage.outputs.values(), loss)
        if added:
            total = self._ending.added(load, stage, microbatch, added)
            load.added.setdefault(microbatch, []).append(total.detach())
            passage.add_root(ADDED, total)
        return passage

    def can_split(self, stage: int) -> bool:
        """Whether a backward may be split; that of sharded parameters ends with their reduction, so it may not."""
        return not self._part.shards.has(stage)

    def own_gradients(self, stage: int, microbatch: int) -> dict[str, Tensor | None]:
        """The gradients that begin in this stage: those of the losses."""
        load = self._loaded
        self._part.shards.before_backward(stage)
        found: dict[str, Tensor | None] = {}
        if microbatch in load.added:
            found[ADDED] = torch.full_like(load.added[microbatch][0], self._ending.scale)
        if stage == self._last:
            found[LOSS] = self._ending.gradient(load, microbatch)
        return found

    def reduce(self, stage: int) -> None:
        """All microbatches have passed: average the gradients of the stage over the replicas."""
        self._part.replicas.start(stage)

    def unshard(self, stage: int) -> None:
        """Gather the parameters of the stage."""
        self._part.shards.unshard(stage)

    def reshard(self, stage: int) -> None:
        """Keep only this rank's share of the stage's parameters."""
        self._part.shards.reshard(stage)

    @property
    def _loaded(self) -> StepData:
        assert self.load is not None
        return self.load
