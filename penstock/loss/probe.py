"""Compares the gradients of a loss for some samples together with those for the same samples in parts.

Let L(B) be the loss of a batch and L(i) that of its microbatch i alone. Backward starts from L(i) in every microbatch,
so the gradients of the step are those of the batch if there are weights w_i with

    dL(B)/dy_i = w_i dL(i)/dy_i    for the outputs y_i of every microbatch,    and    L(B) = sum of w_i L(i).

A mean over samples has w_i = n_i / n, a mean over labels the share of the labels, a sum w_i = 1. The identity does not
depend on how the loss is written, so both sides are evaluated:

    w_i = <dL(B)/dy_i, dL(i)/dy_i> / <dL(i)/dy_i, dL(i)/dy_i>

The targets are the real ones, because labels, masks and class weights determine the weights. The outputs are not: when
the first microbatch has been computed and its backward waits for its weight, the outputs of the others do not exist
yet. This is enough, because weights must not depend on the outputs; two different sets of outputs show whether they do.
If the gradients are not parallel, or the weights depend on the outputs, no weights exist: the samples interact, as in a
contrastive loss, or the loss is not linear in a sum over samples, as the root of a mean.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.capture import ROUNDING, DispatchMode, coarsest, real_entries
from penstock.ir import leaves

VALUE_FACTOR = 10.0
"""how much further apart than gradients equal losses may be: a loss is a sum of many entries, which may cancel"""
_FLOOR = 1e-6
"""a gradient below this share of the largest one is treated as rounding"""

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Evaluation:
    """The loss of one or several parts together, and its gradients."""

    loss: float
    gradients: Mapping[int, Gradients]
    """by part, with respect to the outputs of the part; one that is missing is zero"""
    shared: Gradients
    """with respect to tensors that all parts use, such as parameters of the loss function"""
    dtype: torch.dtype
    """the lowest precision in which something was computed"""

    @classmethod
    def of(
        cls, loss: Tensor, inputs: Mapping[tuple[int, str], Tensor], shared: Mapping[str, Tensor], dtype: torch.dtype
    ) -> "Evaluation":
        """Take the gradients of a loss that was computed from `inputs`, by part and name, and `shared` tensors."""
        # A loss may have the shape (1,).
        number = loss.reshape(())
        tensors = [*inputs.values(), *shared.values()]
        computed: Sequence[Tensor | None] = [None] * len(tensors)
        if number.requires_grad and tensors:
            computed = torch.autograd.grad(number, tensors, allow_unused=True, retain_graph=True)
        gradients: dict[int, dict[str, Tensor]] = {part: {} for part, _ in inputs}
        for (part, name), gradient in zip(inputs, computed, strict=False):
            if gradient is not None:
                gradients[part][name] = real_entries(gradient)
        others = zip(shared, computed[len(inputs) :], strict=True)
        return cls(float(number.detach()), gradients, {n: g for n, g in others if g is not None}, dtype)


Evaluate = Callable[[Sequence[int]], Evaluation]
"""evaluates a loss for the parts with these indices together; the outputs of a part are the same in every call"""


class ProbeError(Exception):
    """The loss cannot be evaluated in parts; the message gives the reason."""


class Probe:
    """The evaluations of some parts together and of each of them alone."""

    def __init__(self, parts: Sequence[int], union: Evaluation, alone: Sequence[Evaluation]) -> None:
        self.parts, self.union, self.alone = list(parts), union, list(alone)

    @classmethod
    def of(cls, evaluate: Evaluate, parts: Sequence[int], alone: dict[int, Evaluation] | None = None) -> "Probe":
        """Evaluate the parts together and each of them alone.

        `alone` holds evaluations of single parts that were made before; new ones are added to it.
        """
        alone = {} if alone is None else alone
        # All parts together first: the loss that a model returns shows only there which dimensions hold the samples.
        union = evaluate(parts)
        for part in parts:
            if part not in alone:
                alone[part] = evaluate([part])
        return cls(parts, union, [alone[part] for part in parts])

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """The weights of the parts from their gradients: 0 for a part that does not count, NaN if no weight exists."""
        weights = []
        for part, alone in zip(self.parts, self.alone, strict=True):
            # The weight is the projection of the gradient for all parts on that for this part alone. Whether the two
            # are parallel at all is left to `fits`.
            together, separate = self.union.gradients.get(part, {}), alone.gradients.get(part, {})
            square = _dot(separate, separate)
            if not together and not separate:
                # A model without modules has no values between them, and so no gradients of parts.
                weights.append(math.nan)
            elif not any(bool(gradient.any()) for gradient in together.values()):
                # A microbatch without labels: its own loss is 0/0, and its gradient zero or NaN. If it has a gradient
                # alone, other samples suppress it, as in a maximum; for other outputs they might not.
                weights.append(math.nan if square and math.isfinite(square) else 0.0)
            else:
                weights.append(_dot(together, separate) / square if square else math.nan)
        return tuple(weights)

    @property
    def loss(self) -> float:
        """The loss of all parts together."""
        return self.union.loss

    @property
    def is_decisive(self) -> bool:
        """Whether the gradients determine weights: not if all labels are ignored, or a clamp cuts off all gradients."""
        if not math.isfinite(self.union.loss):
            return False
        parts = [part for evaluated in (self.union, *self.alone) for part in evaluated.gradients.values()]
        gradients = [gradient for part in parts for gradient in part.values()]
        return any(bool(gradient.any()) for gradient in gradients) or (not gradients and self.union.loss != 0)

    def fits(self, weights: Sequence[float]) -> bool:
        """Whether the weighted losses and gradients of the parts are those of all parts together."""
        tolerance = self.tolerance
        # A part of weight 0 may have a loss of NaN, and is left out.
        counted = [(weight, alone) for weight, alone in zip(weights, self.alone, strict=True) if weight]
        losses = [weight * alone.loss for weight, alone in counted]
        # Relative to the largest term: terms of different sign may cancel.
        scale = max(abs(self.union.loss), *map(abs, losses), 1e-12) if losses else 1.0
        if not abs(sum(losses) - self.union.loss) <= VALUE_FACTOR * tolerance * scale:
            return False
        # Entries are compared by part, because each part has outputs of its own, but rounding is relative to the
        # largest.
        largest = max(map(_largest, self.union.gradients.values()), default=0.0)
        for weight, part, alone in zip(weights, self.parts, self.alone, strict=True):
            separate = {} if weight == 0 else alone.gradients.get(part, {})
            if not _are_equal(self.union.gradients.get(part, {}), [(weight, separate)], tolerance, largest):
                return False
        # All parts use the shared tensors: their gradients add up.
        shared = [(weight, alone.shared) for weight, alone in counted]
        return _are_equal(self.union.shared, shared, tolerance, _largest(self.union.shared))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The lowest precision of all evaluations."""
        return coarsest(evaluated.dtype for evaluated in (self.union, *self.alone))

    @property
    def tolerance(self) -> float:
        """How far apart equal gradients may be because of rounding."""
        return ROUNDING[self.dtype]

    def distance(self, weights: Sequence[float]) -> float:
        """The largest difference from the weights of the gradients, as far as these exist; 0 within rounding."""
        pairs = zip(weights, self.weights, strict=True)
        furthest = max((abs(weight - expected) for weight, expected in pairs if not math.isnan(expected)), default=0.0)
        return furthest if furthest > self.tolerance / 100 else 0.0


def _dot(left: Gradients, right: Gradients) -> float:
    return sum(float((left[name] * right[name]).sum(dtype=torch.float64)) for name in left.keys() & right.keys())


def _largest(gradients: Gradients) -> float:
    return max((float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel()), default=0.0)


def _are_equal(
    expected: Gradients, weighted: Sequence[tuple[float, Gradients]], tolerance: float, largest: float
) -> bool:
    """Whether gradients are a weighted sum of others, each tensor up to rounding relative to its own size.

    `largest` is the largest entry of all tensors: much smaller ones are rounding.
    """
    names = {*expected, *(name for _, gradients in weighted for name in gradients)}
    for name in names:
        terms = [gradients[name] * weight for weight, gradients in weighted if name in gradients]
        total = sum(terms[1:], terms[0]) if terms else torch.zeros_like(expected[name])
        target = expected[name] if name in expected else torch.zeros_like(total)
        if target.numel():
            scale = max(float(target.abs().max()), _FLOOR * largest)
            # Not `>`: comparisons with NaN are false.
            if not float((target - total).abs().max()) <= tolerance * scale:
                return False
    return True


class FunctionTracker(TorchFunctionMode):
    """Records the lowest precision that torch functions compute in, and parameters that they are given."""

    def __init__(self, parameters: Mapping[int, str] | None = None, only_trained: bool = False) -> None:
        """`parameters`: names to record, by id. `only_trained`: ignore the precision of results without gradient."""
        super().__init__()
        self.dtype = torch.float64
        self.used_parameters: set[str] = set()
        self._parameters, self._only_trained = parameters or {}, only_trained

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every torch function."""
        if self._parameters:
            given = [leaf for leaf in leaves((args, kwargs or {})) if isinstance(leaf, nn.Parameter)]
            self.used_parameters.update(self._parameters[id(leaf)] for leaf in given if id(leaf) in self._parameters)
        result = func(*args, **(kwargs or {}))
        is_real = isinstance(result, Tensor) and result.is_floating_point()
        if is_real and (result.requires_grad or not self._only_trained):
            self.dtype = coarsest((self.dtype, result.dtype))
        return result


class ConstantRandomness(DispatchMode):
    """Replaces random numbers of torch by 0.5 or 0: real ones would differ between a batch and its parts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for every operator; dropout then multiplies all samples by the same factor."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.native_dropout.default:
            # It draws its mask inside, and returns it: keep every entry.
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        for leaf in leaves(result):
            if isinstance(leaf, Tensor):
                leaf.fill_(0.5 if leaf.is_floating_point() else 0)
        return result
