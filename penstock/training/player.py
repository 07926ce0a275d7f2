"""Player: runs the stages of this process for the runtime, on the load of the current step."""

from typing import Any

import torch
from torch import Tensor

from penstock.runtime.seeds import mix
from penstock.split import Passage
from penstock.training.adding import added_losses
from penstock.training.ending import Ending
from penstock.training.holdings import Holdings
from penstock.training.load import Load

LOSS, ADDED = "the loss", "added losses"


class Player:
    """Which stage, inputs, recording, loss and random numbers a (stage, microbatch) means."""

    def __init__(self, holdings: Holdings, last: int, ending: Ending) -> None:
        self._holdings, self._last, self._ending = holdings, last, ending
        self.load: Load | None = None

    def forward(self, stage: int, microbatch: int, incoming: dict[str, Any], is_split: bool) -> Passage:
        """One forward of a stage; on the last one also the loss."""
        load = self._loaded
        with added_losses() as added:
            passage = Passage(
                self._holdings.stages[stage],
                load.inputs.recordings[microbatch],
                load.inputs.named[microbatch],
                incoming,
                is_split=is_split,
                seed=mix(load.inputs.seed, microbatch),
            )
        loss = self._ending.finish(load, microbatch, passage.left) if stage == self._last else None
        if loss is not None:
            passage.add_root(LOSS, loss)
        # Without any label that counts a loss is 0/0, and has no say.
        if load.is_training and (loss is None or self._ending.weights(load)[microbatch]):
            load.health.look(stage, (*passage.left.values(), loss))
        if added:
            total = torch.stack([value.reshape(()) for value in added]).sum()
            load.added.setdefault(microbatch, []).append(total.detach())
            passage.add_root(ADDED, total)
        return passage

    def can_split(self, stage: int) -> bool:
        """Whether a backward may be split; that of sharded parameters ends with their reduction, so it may not."""
        return not self._holdings.shards.has(stage)

    def own_gradients(self, stage: int, microbatch: int) -> dict[str, Tensor | None]:
        """The gradients that begin in this stage: those of the losses."""
        load = self._loaded
        self._holdings.shards.before_backward(stage)
        found: dict[str, Tensor | None] = {}
        if microbatch in load.added:
            found[ADDED] = torch.full_like(
                load.added[microbatch][0], load.inputs.share(microbatch) * self._ending.scale
            )
        if stage == self._last:
            found[LOSS] = self._ending.gradient(load, microbatch)
        return found

    def reduce(self, stage: int) -> None:
        """All microbatches have passed: average the gradients of the stage over the replicas."""
        self._holdings.replicas.start(stage)

    def unshard(self, stage: int) -> None:
        """Gather the parameters of the stage."""
        self._holdings.shards.unshard(stage)

    def reshard(self, stage: int) -> None:
        """Keep only this rank's share of the stage's parameters."""
        self._holdings.shards.reshard(stage)

    @property
    def _loaded(self) -> Load:
        assert self.load is not None
        return self.load
