"""Reading: the rule of a loss function, and what to count by it, from a recording of the function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.capture import Granularity, Microbatch, Recording, make_recording
from penstock.errors import PenstockError
from penstock.ir import LossRule, assumed, loss_rule, named_leaves, transform
from penstock.runtime.losses.counting import Tally, facts_of, without_numbers
from penstock.runtime.losses.coupling import couplings
from penstock.runtime.losses.loss_module import LossModule
from penstock.runtime.losses.loss_value import loss_name

LossFn = Callable[[Any, Any], Any]


class Counter(Protocol):
    """What each term of the rule is divided by in a microbatch: what `penstock.runtime.weights.weights` is given.

    None where the loss of a microbatch is not made of such terms. A recording that is known to hold for the microbatch
    saves looking for it.
    """

    def __call__(self, microbatch: Microbatch, recording: Recording | None = None, /) -> tuple[float, ...] | None: ...


@dataclass(frozen=True)
class Reading:
    """A rule, who counts by it, and in words where samples act on each other."""

    rule: LossRule
    counter: Counter
    couplings: tuple[str, ...] = ()
    hidden_couplings: tuple[str, ...] = ()
    """those among them that no trial shows"""
    parameters: tuple[nn.Parameter, ...] = ()
    """those that a function uses"""


def read_function(loss_fn: LossFn, output: Any, target: Any, size: int) -> Reading:
    """The rule of a loss function, and a counter that looks at the targets of microbatches.

    It is found by recording the function on the output of one microbatch, which calls it twice; microbatches of other
    sizes call it twice more if it looks at sizes. A function that cannot be recorded is unknown, which counts as a
    mean over samples.
    """
    counter = FunctionCounter(loss_fn, output, size)
    return counter.read(output, target, size)


class FunctionCounter:
    """Records a loss function where that is needed, and counts what its terms are divided by."""

    def __init__(self, loss_fn: LossFn, output: Any, size: int) -> None:
        self._loss_fn, self._size = loss_fn, size
        self._form = transform(output, _without_memory)
        self._first = assumed("unknown")
        self._tallies: dict[Any, Tally] = {}

    def read(self, output: Any, target: Any, size: int) -> Reading:
        """The reading of an output and a target; its rule is kept for the counts to come."""
        module = LossModule(self._loss_fn)
        recording = self._recorded(module, output, target, size)
        if recording is None:
            return Reading(self._first, self)
        self._first = self._tallies[_form_of(target)].rule
        found = couplings(module, recording, _targets(recording), size)
        names = dict.fromkeys(name for node in recording.graph.nodes for name in node.parameters)
        return Reading(self._first, self, found, (), tuple(map(module.get_parameter, names)))

    def __call__(self, microbatch: Microbatch, recording: Recording | None = None) -> tuple[float, ...] | None:
        """The counts of a microbatch, from its target alone."""
        if not any(term.counts for term in self._first.terms):
            return tuple(float(microbatch.size) for _ in self._first.terms)
        for tally in self._usable(microbatch.target):
            if (counts := self._counted(tally, microbatch)) is not None:
                return counts
        output, size = self._stand_in(microbatch.size), microbatch.size
        if self._recorded(LossModule(self._loss_fn), output, microbatch.target, size) is None:
            return None
        return self._counted(self._tallies[_form_of(microbatch.target)], microbatch)

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

    def _recorded(self, module: LossModule, output: Any, target: Any, size: int) -> Recording | None:
        try:
            with torch.enable_grad():
                recording = make_recording(module, (transform(output, _detached), target), {}, Granularity())
            facts, known, value = facts_of(recording, module), _targets(recording), loss_name(recording)
            rule = loss_rule(recording.record, recording.graph, value, facts, known, size)
            self._tallies[_form_of(target)] = Tally(rule, without_numbers(recording), module)
        except Exception:
            # Whatever a loss function does is its own affair: only its numbers are needed, and torch finds those.
            return None
        return recording

    def _stand_in(self, size: int) -> Any:
        """An output of zeros for so many samples; only its form matters."""

        def zeros(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            shape = (size, *leaf.shape[1:]) if leaf.shape[:1] == (self._size,) else leaf.shape
            return leaf.new_zeros(shape)

        return transform(self._form, zeros)


def _targets(recording: Recording) -> Sequence[str]:
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
