"""Weighing: the weight of each microbatch's loss in that of the batch, by a rule that is looked after in every step."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.capture import Captured
from penstock.errors import RunError
from penstock.ir import LossRule
from penstock.runtime.gradients import ReplicaReducer
from penstock.runtime.losses.case import Case
from penstock.runtime.losses.coupling import couplings
from penstock.runtime.losses.divisors import LiveTerm, live_terms
from penstock.runtime.losses.function_rule import FunctionRule
from penstock.runtime.losses.given import check_reduction, given_rule
from penstock.runtime.losses.judge import Judge
from penstock.runtime.losses.model_rule import ModelRule
from penstock.runtime.losses.proof import are_divisors, have_equal_weights
from penstock.runtime.losses.verdict import MIXED, Verdict
from penstock.runtime.step import Step
from penstock.runtime.weights import Counts, is_exact, weights

LossFn = Callable[[Any, Any], Tensor]
_KINDS = {"sum": 1.0, "tokens": 2.0}
CHANGED = "the loss function goes another way for some microbatches, and by that they would have other weights"
UNCOUNTED = (
    "what the loss is divided by cannot be counted in all microbatches, so that each sample is taken to count alike"
)
WRONG = "the loss was divided by other numbers than were counted, so that the microbatches are weighted wrongly"


class Weighing:
    """Makes the losses of microbatches by their rule, and weighs the microbatches of every step."""

    def __init__(
        self,
        captured: Captured,
        replicas: ReplicaReducer,
        loss_fn: LossFn | None = None,
        reduction: str | None = None,
        elsewhere: Mapping[int, str] | None = None,
    ) -> None:
        """`elsewhere` names the parameters of which this process has no live numbers, by their identity."""
        check_reduction(reduction)
        self._captured, self._replicas = captured, replicas
        self._loss_fn = loss_fn
        self._function = FunctionRule(Judge(loss_fn, reduction), elsewhere or {}) if loss_fn is not None else None
        self._model = ModelRule(captured, reduction)
        self._step, self._num_steps = _Step(), 0
        self._couplings: dict[int, tuple[Any, tuple[str, ...]]] = {}

    @property
    def has_function(self) -> bool:
        """Whether the loss is that of a loss function, and not what the model returns."""
        return self._function is not None

    @property
    def rule(self) -> LossRule | None:
        """The rule in use, once a loss was seen."""
        found = (self._function or self._model).verdict
        return found.rule if found else None

    def loss_name(self, recording: Any) -> str:
        """The value that is the loss of a model which returns it."""
        return self._model.loss_name(recording)

    def loss(self, load: Step, microbatch: int, output: Any) -> Any:
        """The loss of a microbatch by the loss function."""
        assert self._loss_fn is not None
        assert self._function is not None
        case = Case(load.microbatches, microbatch, output)
        is_first = load.is_training and not load.losses
        self._num_steps += is_first
        self._function.before(case, self._num_steps if is_first else 0)
        loss = self._loss_fn(output, case.piece.target)
        if isinstance(loss, Tensor) and loss.grad_fn is not None:
            self._function.after(loss, case)
        return loss

    def look_at(self, load: Step, microbatch: int, output: Any, loss: Tensor) -> None:
        """Note by what a loss was divided; the first of a step tells whether the rule still holds."""
        if not self._step.is_of(load):
            self._step = _Step(load)
        terms = live_terms(loss, load.microbatches[microbatch].size)
        self._step.divided[microbatch] = terms
        if self._function is not None and load.is_training and len(self._step.divided) == 1:
            self._function.compare(terms, Case(load.microbatches, microbatch, output))

    def of(self, load: Step) -> tuple[float, ...]:
        """The weight of every microbatch."""
        found = self._verdict(load)
        counts = self._counts(found, load)
        if counts is None:
            found = Verdict(*given_rule("mean", found.rule, found.counter), (UNCOUNTED,))
            counts = [(float(size),) for size in load.sizes]
        if not self._step.is_of(load):
            self._step = _Step(load)
        self._step.verdict, self._step.counts = found, counts
        if self._replicas.count == 1:
            return weights(found.rule, counts)
        return self._among_replicas(found.rule, [count[found.rule.leading] for count in counts])

    def remarks(self, load: Step) -> tuple[str, ...]:
        """Why the numbers of this step's microbatches are not those of the whole batch, or may not be."""
        found = self._verdict(load)
        if self._function is None:
            doubts = list(found.doubts)
        else:
            coupled = (sentence for recording in load.recordings for sentence in self._coupled(recording))
            doubts = [*coupled, *self._function.doubts]
        return tuple(dict.fromkeys((*doubts, *self._step_doubts(found, load))))

    @property
    def doubts(self) -> tuple[str, ...]:
        """Why the loss function on a whole batch is not, or may not be, that of the microbatches."""
        return tuple(dict.fromkeys(self._function.doubts)) if self._function is not None else ()

    def _coupled(self, recording: Any) -> tuple[str, ...]:
        """How samples act on each other inside the model; the recording is kept, so that no other has its identity."""
        if id(recording) not in self._couplings:
            self._couplings[id(recording)] = recording, couplings(self._captured.model, recording)
        return self._couplings[id(recording)][1]

    def _verdict(self, load: Step) -> Verdict:
        if self._function is None:
            return self._model.of(load.recordings[0], Case(load.microbatches, 0))
        assert self._function.verdict is not None
        return self._function.verdict

    def _counts(self, found: Verdict, load: Step) -> Counts | None:
        """What the terms are divided by in every microbatch; None if the rule does not hold for all of them."""
        pairs = zip(load.microbatches, load.recordings, strict=True)
        counts = [found.counter(piece, recording) for piece, recording in pairs]
        known = [count for count in counts if count is not None]
        return known if len(known) == len(counts) else None

    def _among_replicas(self, rule: LossRule, counts: Sequence[float]) -> tuple[float, ...]:
        """The weights among the microbatches of all replicas, which must have found the same kind of rule."""
        kind = _KINDS.get(rule.lead.kind, 0.0)
        figures = self._replicas.sum(torch.tensor([sum(counts), kind, kind * kind], dtype=torch.float64)).tolist()
        if figures[1] ** 2 != self._replicas.count * figures[2]:
            raise RunError(
                "the replicas of the pipeline find different rules for the loss",
                rule=rule.kind,
                hint='reduction="mean", "tokens" or "sum"',
            )
        if rule.lead.kind == "sum":
            return weights(rule.lead, [(count,) for count in counts])
        others = figures[0] - sum(counts)
        found = weights(rule.lead, [*((count,) for count in counts), (others,)])
        # The replicas average their gradients, so each one's weight is as many times larger.
        return tuple(weight * self._replicas.count for weight in found[: len(counts)])

    def _step_doubts(self, found: Verdict, load: Step) -> tuple[str, ...]:
        """What the numbers of the step itself say."""
        step = self._step
        if not step.is_of(load) or step.verdict is None or step.verdict.is_given:
            return ()
        used, counts = step.verdict, step.counts
        if UNCOUNTED in used.doubts:
            return (UNCOUNTED,)
        if used is not found:
            others = self._counts(found, load)
            if others is None or not have_equal_weights(used.rule, counts, found.rule, others):
                return (CHANGED,)
        terms = step.terms(len(counts))
        if _can_tell(used, terms, load.sizes) and not are_divisors(used.rule, counts, terms):
            if self._function is not None:
                self._function.distrust()
            return (WRONG,)
        is_mixed = used.is_read and used.rule.is_known and not is_exact(used.rule, counts)
        return (MIXED,) if is_mixed else ()


def _can_tell(used: Verdict, terms: Sequence[Sequence[LiveTerm]], sizes: Sequence[int]) -> bool:
    """Whether the divisors of a step's losses say anything about its weights.

    If one weight was borne out for all terms together, what one of several is divided by says nothing. Of single
    samples, a number may be their own.
    """
    if max(sizes) == 1:
        return used.is_read and any(term.counts for term in used.rule.terms)
    return used.is_read or len(terms) == 1


class _Step:
    """What one step was weighted by, and what its losses were divided by."""

    def __init__(self, load: Step | None = None) -> None:
        # Only to tell steps apart: the batch and outputs of one that is over are not held on to.
        self._load = None if load is None else weakref.ref(load)
        self.verdict: Verdict | None = None
        self.counts: Counts = ()
        self.divided: dict[int, tuple[LiveTerm, ...] | None] = {}

    def is_of(self, load: Step) -> bool:
        """Whether this is about the step that works on this load."""
        return self._load is not None and self._load() is load

    def terms(self, num_microbatches: int) -> list[tuple[LiveTerm, ...]]:
        """For each term, that of every microbatch; empty if not all of them show the same terms."""
        found = [self.divided.get(microbatch) for microbatch in range(num_microbatches)]
        shown = [terms for terms in found if terms is not None]
        forms = {tuple(term.kind for term in terms) for terms in shown}
        return list(zip(*shown, strict=True)) if len(shown) == num_microbatches and len(forms) == 1 else []
