"""Shares: the factor with which each microbatch's loss, and its gradient, counts in that of the whole batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.capture import Captured
from penstock.errors import RunError
from penstock.ir.loss import LossRule
from penstock.runtime.replicas import Replicas
from penstock.runtime.weights import weights
from penstock.training.coupling import couplings
from penstock.training.load import Load
from penstock.training.reductions import Counter, given_rule, model_rule, rule_of
from penstock.training.trial import is_right

LossFn = Callable[[Any, Any], Tensor]
REDUCTIONS = (None, "mean", "tokens", "sum")


class Shares:
    """Finds the rule of the loss once, and weighs the microbatches of every step by it."""

    def __init__(self, captured: Captured, loss_fn: LossFn | None, reduction: str | None, replicas: Replicas) -> None:
        if reduction not in REDUCTIONS:
            raise RunError("unknown reduction", reduction=repr(reduction), hint='"mean", "tokens", "sum", or None')
        self._captured, self._loss_fn, self._reduction, self._replicas = captured, loss_fn, reduction, replicas
        self._of_function: tuple[LossRule, Counter] | None = None
        self._of_loss: tuple[str, ...] = ()
        self._of_models: dict[int, tuple[str, LossRule, Counter]] = {}

    @property
    def rule(self) -> LossRule | None:
        """The rule in use, once a loss was seen."""
        if self._of_function is not None:
            return self._of_function[0]
        return next((rule for _, rule, _ in self._of_models.values()), None)

    def remarks(self, recording: Any) -> tuple[str, ...]:
        """Why the numbers of a microbatch loop are not those of the whole batch, or may not be."""
        found = couplings(self._captured.model, recording)
        found += self._of_loss
        rule = self.rule
        if rule is not None and rule.kind == "unknown":
            found += ("how the loss is made of its samples cannot be seen, so that each is taken to count alike",)
        if rule is not None and rule.kind == "mixed":
            found += ("the terms of the loss are divided by different things, of which the first over labels counts",)
        return found

    def loss_name(self, recording: Any) -> str:
        """The value that is the loss of a model which returns it."""
        return self._of_model(recording)[0]

    def look_at(self, output: Any, target: Any, size: int) -> None:
        """Find out how the loss function makes its loss, from the first output that it is given."""
        if self._of_function is None and self._loss_fn is not None:
            found = rule_of(self._loss_fn, output, target)
            self._of_loss = found[1].couplings
            if self._reduction is not None:
                self._of_function = given_rule(self._reduction, *found)
                return
            self._of_function = self._tried(self._loss_fn, found, output, target, size)

    def _tried(
        self, loss_fn: LossFn, found: tuple[LossRule, Counter], output: Any, target: Any, size: int
    ) -> tuple[LossRule, Counter]:
        """The rule that was seen if it holds on a trial, else one that does; where none does, that is remarked."""
        if is_right(loss_fn, found, output, target, size) is not False:
            return found
        for reduction in ("mean", "sum"):
            other = given_rule(reduction, *found)
            if is_right(loss_fn, other, output, target, size):
                return other
        if not self._of_loss:
            self._of_loss = (
                "the loss of a microbatch is not made of those of its parts, so samples act on each other",
            )
        return found

    def of(self, load: Load) -> tuple[float, ...]:
        """The factor of every microbatch."""
        rule, counter = self._of_function or self._of_model(load.inputs.recordings[0])[1:]
        pairs = zip(load.inputs.microbatches, load.inputs.recordings, strict=True)
        counts = [counter(piece, recording) for piece, recording in pairs]
        if rule.kind == "sum" or self._replicas.count == 1:
            return weights(rule, counts)
        everywhere = self._replicas.sum(torch.tensor(counts, dtype=torch.float64).sum(0))
        others = (everywhere - torch.tensor(counts, dtype=torch.float64).sum(0)).tolist()
        # The replicas average their gradients, so each one's share is as many times larger.
        return tuple(share * self._replicas.count for share in weights(rule, [*counts, others])[: len(counts)])

    def _of_model(self, recording: Any) -> tuple[str, LossRule, Counter]:
        if id(recording) not in self._of_models:
            name, rule, counter = model_rule(self._captured, recording)
            self._of_models[id(recording)] = (name, *self._asked(rule, counter))
        return self._of_models[id(recording)]

    def _asked(self, rule: LossRule, counter: Counter) -> tuple[LossRule, Counter]:
        return (rule, counter) if self._reduction is None else given_rule(self._reduction, rule, counter)
