"""Detects whether a loss that a module adds with `add_loss` is a mean or a sum over samples, and weights it."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.batches import with_columns_of
from penstock.capture import Captured, LruCache, Recording
from penstock.loss.add_loss import Added
from penstock.loss.probe import Evaluation, Probe
from penstock.loss.reduction_weights import SAMPLE_REDUCTIONS, Piece, Reduction
from penstock.loss.returned_loss import ModelLoss, Noise
from penstock.loss.samples import choose_parts
from penstock.loss.step_weights import LossStep

_NUM_DRAWS = 4
"""more than for the loss of a batch, because added losses are not compared again in later steps"""


class _Detected(NamedTuple):
    """The reduction of an added loss, and whether the evaluations have shown it."""

    reduction: str
    is_certain: bool


class AddedLosses:
    """Weights every added loss as a mean or a sum over samples, detected by evaluation on parts or given by the user.

    A penalty on parameters only is the same in every microbatch, and is weighted like a mean.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._detected: LruCache[tuple[int, Recording, int], list[_Detected]] = LruCache()
        """the reduction of every loss that a stage adds, by stage, recording and number of losses: a block may add one
        for some microbatches only"""
        self.warnings: tuple[str, ...] = ()
        """about added losses whose weights may not be those of one process"""

    def total(
        self,
        step: LossStep,
        microbatch: int,
        stage: int,
        nodes: Collection[str],
        added: Sequence[Added],
        num_samples: float,
    ) -> Tensor:
        """The weighted sum of the losses that a stage adds for a microbatch.

        `nodes` are those of the stage, and `num_samples` is the size of the batch, averaged over the replicas.
        """
        names, size = [loss.reduction for loss in added], step.microbatches[microbatch].size
        if size != num_samples and None in names:
            detected = self._detected.get_or_make(
                (stage, step.recordings[microbatch], len(added)),
                lambda: self._detect(step, microbatch, stage, nodes, len(added)),
            )
            for number, (loss, found) in enumerate(zip(added, detected, strict=True)):
                # A loss of zero has any weight, as a penalty on large activations that are small so far.
                if loss.reduction is None and not found.is_certain and bool(loss.value.detach().any()):
                    self._warn(stage, number)
            names = [given or found.reduction for given, found in zip(names, detected, strict=True)]
        # Without a name the microbatch is the batch: a mean and a sum have the same weight.
        weights = [Reduction(name or "mean").weights_of((size,), num_samples)[0] for name in names]
        return torch.stack([loss.value.reshape(()) * weight for loss, weight in zip(added, weights, strict=True)]).sum()

    def _warn(self, stage: int, number: int) -> None:
        problem = "could not be identified as a mean or a sum over samples, and is weighted like a mean"
        hint = 'add_loss(..., reduction="mean" or "sum") overrides'
        text = f"a loss added by add_loss in stage {stage} (number {number}) {problem}: {hint}"
        if text not in self.warnings:
            self.warnings += (text,)

    def _detect(
        self, step: LossStep, microbatch: int, stage: int, nodes: Collection[str], count: int
    ) -> list["_Detected"]:
        """The reductions of the `count` losses that a stage adds."""
        try:
            draws, sizes = self._probes(step, microbatch, nodes)
        except Exception:  # the user's model may raise anything
            draws, sizes = [], []
        pieces: list[Piece] = [({}, size) for size in sizes]
        weights = {name: Reduction(name).weights(pieces) for name in SAMPLE_REDUCTIONS}
        detected: list[_Detected] = []
        for number in range(count):
            probes = [draw[number] for draw in draws if len(draw) == count]
            fitting = [name for name in weights if probes and all(probe.fits(weights[name]) for probe in probes)]
            # A mean over chosen samples looks like a sum as long as only one of the parts has any.
            has_evidence = fitting == ["mean"] or (fitting == ["sum"] and any(map(_all_parts_count, probes)))
            detected.append(_Detected(fitting[0] if has_evidence else "mean", has_evidence))
        return detected

    def _probes(self, step: LossStep, microbatch: int, nodes: Collection[str]) -> tuple[list[list[Probe]], list[int]]:
        """The probes of the losses that the nodes of a stage add, in their order, for each of some draws of noise.

        The second result is the number of samples of each part that was evaluated.
        """
        recording, microbatches = step.recordings[microbatch], with_columns_of(step.microbatches, microbatch)
        model = ModelLoss(self._captured, recording, microbatches, {}, recorded=microbatch)
        adding = [node for node in recording.graph.nodes if node.name in recording.nodes_adding_loss]
        # Blocks that add losses must run. Of losses that are added between blocks, those of other stages are dropped
        # below.
        live = {node.module for node in adding if node.is_block and node.name in nodes}
        between = [node.name in nodes for node in adding if not node.is_block]
        parts = choose_parts([each.size for each in microbatches], model.sample_size, step_number=model.recorded)

        def evaluations(noise: Noise, chosen: Sequence[int]) -> list[Evaluation]:
            run, is_of_stage = model.run(noise, chosen, live), iter(between)
            values = [value for owner, value in run.added if (owner in live if owner else next(is_of_stage))]
            return [Evaluation.of(value, noise.leaves(), noise.shared(), run.dtype) for value in values]

        draws = []
        with model.isolated():
            for draw in range(_NUM_DRAWS):
                noise = model.noise(parts, draw, *((1.0,) if draw % 4 > 1 else ()))
                union = evaluations(noise, range(len(parts)))
                alone = [evaluations(noise, [number]) for number in range(len(parts))]
                columns = zip(union, *alone, strict=True)
                draws.append([Probe(range(len(parts)), together, separate) for together, *separate in columns])
        return draws, [part.length for part in parts]


def _all_parts_count(probe: Probe) -> bool:
    """Whether the loss of each part alone has a value or a gradient."""
    return all(
        alone.loss or any(bool(gradient.any()) for part in alone.gradients.values() for gradient in part.values())
        for alone in probe.alone
    )
