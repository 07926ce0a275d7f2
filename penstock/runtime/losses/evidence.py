"""Evidence: losses and gradients of a batch and of its parts, and whether weights make the one of the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 5e-2
_VALUE = 10.0
"""how much more a loss may be off than its gradients: it is a sum of many, which may cancel"""
_FLOOR = 1e-6
"""a gradient that is this much smaller than another is taken for its rounding"""


@dataclass(frozen=True)
class Outcome:
    """A loss, and its gradients with respect to the tensors that it was made of."""

    loss: float
    gradients: tuple[Tensor | None, ...]
    dtype: torch.dtype
    """of the lowest precision on the way"""

    @property
    def is_finite(self) -> bool:
        """Whether there is anything to compare."""
        return math.isfinite(self.loss)


@dataclass(frozen=True)
class Part:
    """The outcome for some of the samples, and which of them."""

    outcome: Outcome
    start: int
    length: int


@dataclass(frozen=True)
class Evidence:
    """What a batch and its parts gave."""

    whole: Outcome
    parts: tuple[Part, ...]
    dims: tuple[int | None, ...]
    """for each tensor the dimension that holds the samples; None: all of them are given all of it"""

    @property
    def is_precise(self) -> bool:
        """Whether a small difference is more than rounding."""
        return self.whole.dtype in _TOLERANCES

    def bears_out(self, weights: Sequence[float]) -> bool:
        """Whether the weighted losses and gradients of the parts are those of the whole."""
        counted = [(part, weight) for part, weight in zip(self.parts, weights, strict=True) if weight]
        if not all(part.outcome.is_finite for part, _ in counted):
            return False
        losses = [weight * part.outcome.loss for part, weight in counted]
        scale = max(abs(self.whole.loss), *map(abs, losses), 1e-12) if losses else 1.0
        if abs(sum(losses) - self.whole.loss) > _VALUE * self._tolerance * scale:
            return False
        largest = max((_largest(gradient) for gradient in self.whole.gradients), default=0.0)
        return all(self._agrees(place, counted, largest) for place in range(len(self.dims)))

    @property
    def _tolerance(self) -> float:
        return _TOLERANCES.get(self.whole.dtype, _COARSE)

    def _agrees(self, place: int, counted: Sequence[tuple[Part, float]], largest: float) -> bool:
        """Whether the gradients of one tensor do."""
        expected = self.whole.gradients[place]
        found = [(part, part.outcome.gradients[place], weight) for part, weight in counted]
        if expected is None:
            return all(gradient is None for _, gradient, _ in found)
        made = torch.zeros_like(expected, dtype=torch.float64)
        for part, gradient, weight in found:
            if gradient is not None:
                own = made if self.dims[place] is None else made.narrow(self.dims[place], part.start, part.length)  # type: ignore[arg-type]
                own += gradient.double() * weight
        scale = max(_largest(expected), _FLOOR * largest)
        return _largest(made - expected.double()) <= self._tolerance * scale


def _largest(gradient: Tensor | None) -> float:
    return float(gradient.abs().max()) if gradient is not None and gradient.numel() else 0.0
