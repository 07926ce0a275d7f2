"""Added: the weights of losses that modules add, from whatever stage they are in."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from penstock.ir import assumed
from penstock.runtime.adding import Added
from penstock.runtime.losses.divisors import LiveTerm, live_terms
from penstock.runtime.losses.nodes import couples_rows
from penstock.runtime.losses.proof import are_divisors

Kind = Literal["mean", "sum"]
Place = tuple[int, int]
"""the stage that adds a loss, and which of its added losses it is"""
_NAME = "a loss added by add_loss in stage {} (number {})"


class AddedLosses:
    """Knows how each added loss is made of samples, from its graph or from the user; says so where it does not."""

    def __init__(self) -> None:
        self._kinds: dict[Place, Kind] = {}
        self._doubts: dict[str, None] = {}
        self._divided: dict[tuple[Place, int], list[tuple[float, LiveTerm]]] = {}

    def total(self, added: Sequence[Added], stage: int, weight: float) -> Tensor:
        """The sum of what a stage adds for a microbatch, each times its weight; `weight` is that of its samples."""
        parts = []
        for number, one in enumerate(added):
            kind = self._kind(one, (stage, number), weight)
            parts.append(one.value.reshape(()) * (1.0 if kind == "sum" else weight))
        return torch.stack(parts).sum()

    def doubts(self) -> tuple[str, ...]:
        """In words, what may not be as in one process; to be asked at the end of a step."""
        for (place, _), divided in self._divided.items():
            counts, terms = [(weight,) for weight, _ in divided], [term for _, term in divided]
            fits = {kind for kind in ("mean", "sum") if are_divisors(assumed(kind), counts, [terms])}
            if self._kinds[place] not in fits:
                self._doubt(place, "is divided by something else than the number of samples")
                # Only sizes that differ tell a number of samples from another number.
                self._kinds[place] = "sum" if fits == {"sum"} else "mean"
            elif len(fits) > 1 and terms[0].kind == "sum" and terms[0].may_be_mean:
                self._doubt(place, "is a sum divided by what may be the number of samples or not: say reduction=")
        self._divided.clear()
        return tuple(self._doubts)

    def _kind(self, one: Added, place: Place, weight: float) -> Kind:
        """How it is weighted, found once; what it was divided by is noted in every step."""
        if one.reduction is not None:
            return "sum" if one.reduction == "sum" else "mean"
        # An evaluation leaves no graph: what was seen in training holds.
        terms = live_terms(one.value) if one.value.grad_fn is not None else ()
        is_plain = terms is not None and all(term.kind != "unknown" for term in terms)
        if not is_plain or len({_kind_of(term) for term in terms or ()}) > 1:
            self._doubt(place, "is no plain sum or mean over samples, and is taken to be a mean: say reduction=")
        elif terms:
            self._kinds.setdefault(place, _kind_of(terms[0]))
            for which, term in enumerate(terms):
                self._divided.setdefault((place, which), []).append((weight, term))
            if couples_rows(one.value):
                self._doubt(place, "is made of something that is taken over all samples, and a microbatch has fewer")
        return self._kinds.get(place, "mean")

    def _doubt(self, place: Place, words: str) -> None:
        self._doubts[f"{_NAME.format(*place)} {words}"] = None


def _kind_of(term: LiveTerm) -> Kind:
    """What is made of parameters alone counts once for a batch, as a mean does."""
    return "sum" if term.kind == "sum" and not term.may_be_mean else "mean"
