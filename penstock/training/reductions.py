"""Reductions: finds out how the loss of a batch is made up of those of its microbatches."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.capture import Captured
from penstock.capture.leaves import Granularity
from penstock.capture.recording import Recording, make_recording
from penstock.errors import PenstockError, RunError
from penstock.ir.containers import named_leaves, transform
from penstock.ir.loss import Count, LossRule, assumed
from penstock.ir.loss_origin import loss_rule
from penstock.runtime.batch import Microbatch
from penstock.runtime.weights import count_labels
from penstock.training.counting import Tally, facts_of, without_numbers
from penstock.training.coupling import couplings
from penstock.training.loss_module import LossModule
from penstock.training.loss_value import loss_name

LossFn = Callable[[Any, Any], Any]


class Counter(Protocol):
    """What each term of the rule is divided by in a microbatch: what `penstock.runtime.weights.weights` is given.

    A recording that is known to hold for the microbatch saves looking for it.
    """

    def __call__(self, microbatch: Microbatch, recording: Recording | None = None, /) -> tuple[float, ...]: ...


def rule_of(loss_fn: LossFn, output: Any, target: Any) -> tuple[LossRule, "LossRuleFinder"]:
    """The rule of a loss function, and a counter that looks at the targets of microbatches.

    It is found by recording the function on the output of one microbatch, which calls it twice; microbatches of other
    sizes call it twice more if it looks at sizes. A function that cannot be recorded is unknown, which counts as a
    mean over samples.
    """
    finder = LossRuleFinder(loss_fn, output)
    return finder.rule(output, target), finder


def model_rule(captured: Captured, recording: Recording) -> tuple[str, LossRule, Counter]:
    """The value that is the loss of a model which returns it, its rule, and a counter that looks at the inputs."""
    tallies: dict[int, Tally] = {}

    def tally(found: Recording) -> Tally:
        if id(found) not in tallies:
            # A tally keeps its recording, so that no other one gets its identity.
            facts = facts_of(found, captured.model)
            rule = loss_rule(found.record, found.graph, loss_name(found), facts)
            tallies[id(found)] = Tally(rule, found, captured.model)
        return tallies[id(found)]

    first = tally(recording)

    def counter(microbatch: Microbatch, recording: Recording | None = None) -> tuple[float, ...]:
        size, plain = microbatch.size, tuple(float(microbatch.size) for _ in first.rule.terms)
        if not any(term.counts for term in first.rule.terms):
            return plain
        own = tally(recording or captured.recording(microbatch.args, microbatch.kwargs))
        inputs = captured.inputs(microbatch.args, microbatch.kwargs)
        return own(inputs, size) if own.is_like(first.rule) else plain

    return loss_name(recording), first.rule, counter


def given_rule(reduction: str, rule: LossRule, counter: Counter) -> tuple[LossRule, Counter]:
    """The rule that the user asks for, "mean", "tokens" or "sum", in place of the one that was found.

    For "tokens" without a count of its own, labels are the tensors of the target, or of the inputs named `labels`, and
    -100 is ignored.
    """
    if reduction not in ("mean", "tokens", "sum"):
        raise RunError("unknown reduction", reduction=repr(reduction), hint='"mean", "tokens" or "sum"')
    if reduction != "tokens":
        return assumed(reduction), _sample_counter  # type: ignore[arg-type]
    if rule.kind == "tokens":
        return rule, counter
    return assumed("tokens", count=Count("target")), _label_counter


def _sample_counter(microbatch: Microbatch, recording: Recording | None = None) -> tuple[float, ...]:
    return (float(microbatch.size),)


def _label_counter(microbatch: Microbatch, recording: Recording | None = None) -> tuple[float, ...]:
    labels = microbatch.kwargs.get("labels") if microbatch.target is None else microbatch.target
    tensors = [
        leaf for _, leaf in named_leaves(labels, "") if isinstance(leaf, Tensor) and not leaf.is_floating_point()
    ]
    if not tensors:
        raise RunError(
            'reduction="tokens" finds no labels to count',
            hint="give class indices as target= or labels=, or another reduction",
        )
    return (sum(count_labels(tensor, -100) for tensor in tensors),)


class LossRuleFinder:
    """Records a loss function where that is needed, and counts what its terms are divided by.

    `couplings` says in words where the function makes samples act on each other.
    """

    def __init__(self, loss_fn: LossFn, output: Any) -> None:
        self.loss_fn = loss_fn
        self._form = transform(output, _without_memory)
        self._first = assumed("unknown")
        self._tallies: dict[Any, Tally] = {}
        self.couplings: tuple[str, ...] = ()

    def rule(self, output: Any, target: Any) -> LossRule:
        """The rule for an output and a target; it is kept for the counts to come."""
        self._first = self._recorded(output, target) or assumed("unknown")
        return self._first

    def __call__(self, microbatch: Microbatch, recording: Recording | None = None) -> tuple[float, ...]:
        """The counts of a microbatch, from its target alone."""
        plain = tuple(float(microbatch.size) for _ in self._first.terms)
        if not any(term.counts for term in self._first.terms):
            return plain
        for tally in self._usable(microbatch.target):
            if (counts := self._counted(tally, microbatch)) is not None:
                return counts
        if self._recorded(self._stand_in(microbatch.size), microbatch.target) is None:
            return plain
        return self._counted(self._tallies[_form_of(microbatch.target)], microbatch) or plain

    def _usable(self, target: Any) -> list[Tally]:
        """Those that hold for a target: made for its form, or not looking at sizes."""
        own = self._tallies.get(_form_of(target))
        return [own] if own else [found for found in self._tallies.values() if not found.recording.record.sized][:1]

    def _counted(self, tally: Tally, microbatch: Microbatch) -> tuple[float, ...] | None:
        inputs = {name: leaf for name, leaf in named_leaves(microbatch.target, "target") if isinstance(leaf, Tensor)}
        if not tally.is_like(self._first):
            return None
        try:
            return tally(inputs, microbatch.size)
        except (PenstockError, RuntimeError, IndexError, KeyError):
            # Made for a target of another form, or another way through the function: it is recorded anew.
            return None

    def _recorded(self, output: Any, target: Any) -> LossRule | None:
        module = LossModule(self.loss_fn)
        try:
            with torch.enable_grad():
                recording = make_recording(module, (transform(output, _detached), target), {}, Granularity())
            facts, known, value = facts_of(recording, module), _targets(recording), loss_name(recording)
            rule = loss_rule(recording.record, recording.graph, value, facts, known)
            self.couplings = self.couplings or couplings(module, recording, known)
            self._tallies[_form_of(target)] = Tally(rule, without_numbers(recording), module)
        except Exception:
            # Whatever a loss function does is its own affair: only its numbers are needed, and torch finds those.
            return None
        return rule

    def _stand_in(self, size: int) -> Any:
        """An output of zeros for so many samples; only its form matters."""
        tensors = [leaf for _, leaf in named_leaves(self._form, "") if isinstance(leaf, Tensor) and leaf.dim()]
        batch = tensors[0].shape[0] if tensors else 0

        def zeros(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.new_zeros((size, *leaf.shape[1:]) if leaf.shape[:1] == (batch,) else leaf.shape)

        return transform(self._form, zeros)


def _targets(recording: Recording) -> list[str]:
    return [name for name in recording.record.inputs if name.split(".")[0] == "target"]


def _without_memory(leaf: object) -> object:
    """A tensor of the same form on the same device that takes no memory and holds on to none."""
    return leaf.new_zeros(()).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf


def _form_of(target: Any) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (name, repr(leaf))
        for name, leaf in named_leaves(target, "target")
    )


def _detached(leaf: object) -> object:
    """Activations need gradients, which is how the record tells them from what is known before the step."""
    return leaf.detach().requires_grad_(leaf.is_floating_point()) if isinstance(leaf, Tensor) else leaf
