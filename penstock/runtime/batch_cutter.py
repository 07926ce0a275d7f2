"""BatchCutter: cuts the batch of a step into microbatches, and finds the recording that holds for each."""

import inspect
from collections.abc import Mapping
from typing import Any

from penstock.capture import split_batch
from penstock.ir import Plan, named_inputs, named_leaves
from penstock.runtime.model_part import ModelPart
from penstock.runtime.step_data import CutBatch

INPUTS = ("all", "first")
_TARGET = "target"
Batch = tuple[Any, Any, Any]


class BatchCutter:
    """Cuts batches into microbatches with their recordings."""

    def __init__(
        self, part: ModelPart, plan: Plan, inputs: str, split: Mapping[str, int | None], has_loss_fn: bool
    ) -> None:
        self._part, self._split = part, dict(split)
        self.plan, self.has_loss_fn = plan, has_loss_fn
        self.is_handed_out = inputs == "first" and not part.groups.is_local
        """whether only rank 0 is given the batch"""

    def placed(self, batch: Batch) -> Batch:
        """A model whose forward takes the target gets it as any other argument."""
        args, kwargs, target = batch
        if target is None or _TARGET not in inspect.signature(self._part.captured.model.forward).parameters:
            return batch
        return args, {**kwargs, _TARGET: target}, None

    def cut(self, batch: Batch, recordings: tuple[Any, ...] | None = None) -> CutBatch:
        """Cut a batch, and find the recordings unless they are known."""
        self._part.check_numbers()
        captured, (args, kwargs, target) = self._part.captured, batch
        pieces = split_batch(captured.model.forward, args, kwargs, target, self.plan.num_microbatches, self._split)
        if recordings is not None:
            return CutBatch(pieces, recordings, tuple(captured.inputs(piece.args, piece.kwargs) for piece in pieces))
        found, named = zip(*captured.recordings((piece.args, piece.kwargs) for piece in pieces), strict=True)
        return CutBatch(pieces, found, named)

    def content(self, batch: CutBatch) -> list[dict[str, Any]]:
        """All that the ranks must have been given alike, by name, however it was passed."""
        forward = self._part.captured.model.forward
        return [
            {**named_inputs(forward, piece.args, piece.kwargs), **dict(named_leaves(piece.target, _TARGET))}
            for piece in batch.microbatches
        ]
