"""Loss: by what a loss is divided, which is what says how much each microbatch counts.

A loss over a batch is a sum over its samples divided by something that is itself a sum over the samples: their number,
the number of labels that are not ignored, or nothing. The loss of the whole batch is then the sum of the losses of its
microbatches, each times its weight: its part of the divisor.

A *rule* says how a loss is reduced: of which *terms* it is the sum, and by what each of them is divided. A *count* is
that divisor in one microbatch, and the *weight* of a microbatch is its count over that of the batch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock.errors import RunError

Kind = Literal["mean", "tokens", "sum", "mixed", "curved", "unknown"]
TermKind = Literal["mean", "tokens", "sum", "constant", "curved", "unknown"]
Measure = Literal["labels", "entries", "total", "number", "share"]
"""what of a value is counted: the entries that are not ignored, all entries, their sum, the value itself, or that times
the samples"""

_ROUNDED: dict[str, Callable[[float], np.floating[Any]]] = {"float32": np.float32, "float16": np.float16}


@dataclass(frozen=True)
class Count:
    """How the divisor of a mean over labels is found before the step, from the inputs of the model alone."""

    value: str
    """the labels, the mask, or whatever else is measured"""
    measure: Measure = "labels"
    ignore_index: int = -100
    """labels that do not count"""
    class_weights: str = ""
    """the value, parameter, buffer or constant that says how much labels of each class count; empty: all count one"""
    nodes: tuple[str, ...] = ()
    """the nodes that make the value and the class weights, all from inputs"""
    at_least: float = 0.0
    """the divisor is never smaller than this"""
    plus: float = 0.0
    """what is added to the number to make the divisor"""
    dtype: str = "float64"
    """the type of the divisor: a small number that is added may vanish in it"""

    def divisor(self, number: float) -> float:
        """By what a sum over entries is divided when so many of them count."""
        found = max(number + self.plus, self.at_least)
        return float(_ROUNDED[self.dtype](found)) if self.dtype in _ROUNDED else found


@dataclass(frozen=True)
class Term:
    """One summand of a loss.

    "mean": every sample counts alike. "tokens": every counted label does. "sum": divided by nothing that depends on
    the samples. "constant": does not depend on the batch. "curved": a function of other losses that is no sum of
    them, such as the exponential of a mean. "unknown": none of these as far as can be seen.
    """

    kind: TermKind
    value: str
    """what the loss function made"""
    counts: tuple[Count, ...] = ()
    """of "tokens": its one count"""
    divided_by: str = ""
    """of "sum": the number, or the value alike for all samples, by which it is divided"""


@dataclass(frozen=True)
class LossRule:
    """How a loss comes about: its kind if all terms agree in what they are divided by, else "mixed"."""

    kind: Kind
    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise RunError("a rule of a loss without terms", kind=self.kind)

    @property
    def leading(self) -> int:
        """The place of the term whose weights stand for all: the first over labels, else the first that varies."""
        kinds = [term.kind for term in self.terms]
        if "tokens" in kinds:
            return kinds.index("tokens")
        return next((place for place, kind in enumerate(kinds) if kind != "constant"), 0)

    @property
    def lead(self) -> "LossRule":
        """The rule of that term alone."""
        return combined([self.terms[self.leading]])

    def has(self, kind: TermKind) -> bool:
        """Whether a term is of this kind."""
        return any(term.kind == kind for term in self.terms)

    @property
    def is_known(self) -> bool:
        """Whether it was seen by what every term is divided."""
        return not self.has("unknown") and not self.has("curved")


def combined(terms: Iterable[Term]) -> LossRule:
    """The rule of a sum of terms."""
    found = tuple(terms)
    varying = tuple(term for term in found if term.kind != "constant")
    divisors = {(term.kind, term.counts) for term in varying}
    if not varying:
        return LossRule("mean", found)
    (kind, _), *others = divisors
    # What does not depend on the batch would be counted once per microbatch by weights that do not sum to one.
    if others or (kind == "sum" and len(varying) < len(found)):
        return LossRule("mixed", found)
    return LossRule(kind, varying)  # type: ignore[arg-type]


def assumed(kind: TermKind, value: str = "", count: Count | None = None) -> LossRule:
    """The rule of a loss that could not be looked into, or about which the user knows better."""
    return combined([Term(kind, value, (count,) if count else ())])
