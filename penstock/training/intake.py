"""Intake: makes the load of a step from the batch that a rank was given, or that rank 0 shares with it."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.errors import RunError
from penstock.ir.plan import Plan
from penstock.runtime.batch import cut
from penstock.runtime.seeds import mix
from penstock.training.handout import Handout
from penstock.training.holdings import Holdings
from penstock.training.load import Inputs, Load, Met

INPUTS = ("all", "first")
_TARGET = "target"
Batch = tuple[Any, Any, Any]


def check_loss(model: nn.Module, loss_fn: object) -> None:
    """Refuse a loss function beside a forward that wants the target itself: who gets it cannot be known."""
    if loss_fn is not None and _TARGET in inspect.signature(model.forward).parameters:
        raise RunError(
            "both a loss_fn and the model's forward take the target",
            model=type(model).__name__,
            hint="leave out loss_fn if the model returns its loss, or rename the parameter of its forward",
        )


class Intake:
    """Cuts batches into microbatches with their recordings."""

    def __init__(self, holdings: Holdings, plan: Plan, inputs: str, split: Mapping[str, int | None], seed: int) -> None:
        if inputs not in INPUTS:
            raise RunError("unknown inputs", given=repr(inputs), choices=INPUTS)
        self._holdings, self._plan, self._split, self._seed = holdings, plan, dict(split), seed
        is_handed_out = inputs == "first" and not holdings.crew.is_alone
        self._handout = Handout(holdings, plan, self._meet) if is_handed_out else None

    @property
    def everyone_has_it(self) -> bool:
        """Whether every rank passes the whole batch, so that they can be compared."""
        return self._handout is None

    def load(self, batch: Batch, is_training: bool, step: int, keeps_outputs: bool) -> Load:
        """The load of one step."""
        batch = self._placed(batch)
        met = self._meet(batch) if self._handout is None else self._handout.hand_out(batch)
        replicas, crew = self._holdings.replicas, self._holdings.crew
        size = float(sum(piece.size for piece in met.microbatches))
        mean = float(replicas.sum(torch.tensor(size))) / replicas.count
        return Load(Inputs(*met, mix(self._seed, step, crew.replica), mean), is_training, keeps_outputs)

    def _placed(self, batch: Batch) -> Batch:
        """A model whose forward takes the target gets it as any other argument."""
        args, kwargs, target = batch
        if target is None or _TARGET not in inspect.signature(self._holdings.captured.model.forward).parameters:
            return batch
        return args, {**kwargs, _TARGET: target}, None

    def _meet(self, batch: Batch, recordings: tuple[Any, ...] | None = None) -> Met:
        """Cut a batch, and find the recordings unless they are known."""
        captured, (args, kwargs, target) = self._holdings.captured, batch
        pieces = cut(captured.model.forward, args, kwargs, target, self._plan.num_microbatches, self._split)
        if recordings is not None:
            return Met(pieces, recordings, tuple(captured.inputs(piece.args, piece.kwargs) for piece in pieces))
        found, named = zip(*captured.met((piece.args, piece.kwargs) for piece in pieces), strict=True)
        return Met(pieces, found, named)
