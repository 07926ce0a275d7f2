"""Divisors: by what the terms of a loss were really divided, read from the autograd graph that it left behind."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from penstock.runtime.losses.nodes import (
    ADDING,
    LABELLED,
    MAX_NODES,
    MEANS,
    PASSING,
    STACKING,
    SUMS,
    Edge,
    Node,
    dims_of,
    inner,
    is_number,
    is_of_parameters,
    is_product_with_number,
    saved,
    shape_of,
    size_of,
)

Factor = float | Tensor | None
"""None: one that cannot be read without computing it again"""
LiveKind = Literal["mean", "sum", "constant", "unknown"]

_MEAN, _SUM = 1, 2
"""how torch numbers the reductions of its losses"""
_STEPS, _COARSE = 64, 0.1
"""how many times the precision of its type a sum of many numbers may be off, and how much at most"""


@dataclass(frozen=True)
class LiveTerm:
    """A term of one microbatch's loss: what it is a sum or mean of, and the factors outside of that.

    Of an unknown one, only the factors outside of the function that makes it a number are known.
    """

    kind: LiveKind
    below: tuple[Factor, ...] = ()
    above: tuple[Factor, ...] = ()
    shape: tuple[int, ...] = ()
    """of what was summed up"""

    @property
    def divisor(self) -> float | None:
        """By what a sum over samples was divided, if that can be read; tensors are read only now."""
        above, below = ([factor for factor in side if factor is not None] for side in (self.above, self.below))
        if len(above) + len(below) < len(self.above) + len(self.below):
            return None
        product = math.prod(map(float, above))
        # What is multiplied with nothing may be divided by anything.
        return math.prod(map(float, below)) / product if product else None

    @property
    def below_all(self) -> float | None:
        """What it was divided by without what it was multiplied with; None if that cannot be read."""
        factors = [float(factor) for factor in self.below if factor is not None]
        return math.prod(factors) if len(factors) == len(self.below) else None

    @property
    def may_be_mean(self) -> bool:
        """Whether a sum is divided by a number that may be how many rows, or entries of rows, were summed up."""
        counts = {math.prod(self.shape[:end]) for end in range(1, len(self.shape) + 1)}
        factors = [float(factor) for factor in self.below if factor is not None]
        factors += [1 / float(factor) for factor in self.above if factor is not None and float(factor)]
        return any(abs(factor - count) <= 1e-6 * count for factor in factors for count in counts)

    @property
    def rounding(self) -> float:
        """How far that may be off because of the types of its factors."""
        factors = (factor for factor in (*self.below, *self.above) if isinstance(factor, Tensor))
        precisions = [torch.finfo(factor.dtype).eps for factor in factors if factor.is_floating_point()]
        return min(_STEPS * max(precisions, default=0.0), _COARSE)


def live_terms(loss: Tensor, num_samples: int = 0) -> tuple[LiveTerm, ...] | None:
    """The terms of a loss from left to right; None if it is more than a sum of sums and means.

    So many numbers as there are samples may be one of each sample, and are not looked into.
    """
    if loss.grad_fn is None:
        return None
    try:
        found = dict(_terms((loss.grad_fn, loss.output_nr), num_samples))
    except _UnclearError:
        return None
    return tuple(found.values())


class _UnclearError(Exception):
    """A node that is no part of a sum of terms."""


def _terms(edge: Edge, num_samples: int) -> Iterator[tuple[Node, LiveTerm]]:
    """The nodes that make terms. A term that is met twice is one."""
    waiting, num_seen = [(edge, LiveTerm("sum"))], 0
    while waiting:
        (node, _), outside = waiting.pop(0)
        num_seen += 1
        if num_seen > MAX_NODES:
            raise _UnclearError
        deeper = _deeper(node, outside, num_samples)
        if deeper:
            waiting = [*deeper, *waiting]
        else:
            yield node, _reduced(node, outside)


def _deeper(node: Node, outside: LiveTerm, num_samples: int) -> list[tuple[Edge, LiveTerm]]:
    """What a number is the sum of, or a multiple; nothing if it is itself a term."""
    name, within = node.name(), inner(node)
    if name in ADDING:
        return [(one, outside) for one in within]
    if name in PASSING and is_number(within[0]):
        return [(within[0], outside)]
    if name in ("MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"):
        return [(within[0], _scaled(node, outside))]
    if name in SUMS | MEANS:
        parts = _numbers(within[0], num_samples)
        below = (*outside.below, float(len(parts))) if name in MEANS else outside.below
        return [(part, LiveTerm("sum", below, outside.above)) for part in parts]
    return []


def _numbers(edge: Edge, num_samples: int) -> list[Edge]:
    """The single numbers that a tensor is made of, if it is made of some."""
    if is_number(edge):
        return [edge]
    within = inner(edge[0])
    if edge[0].name() not in STACKING or not all(map(is_number, within)):
        return []
    if len(within) == num_samples:
        raise _UnclearError
    return within


def _scaled(node: Node, outside: LiveTerm) -> LiveTerm:
    """The factors with that of a product or quotient of which one side has no gradient."""
    name = node.name()
    if name.endswith("1"):
        other: Factor = float(node._saved_other)
    else:
        first, second = (side is not None for side, _ in node.next_functions)
        if (first and second) or (not first and name == "DivBackward0"):
            raise _UnclearError
        other = saved(node, "_saved_other" if first else "_saved_self")
    if name.startswith("Mul"):
        return LiveTerm("sum", outside.below, (*outside.above, other))
    return LiveTerm("sum", (*outside.below, other), outside.above)


def _reduced(node: Node, outside: LiveTerm) -> LiveTerm:
    """The term that a node makes."""
    name, within = node.name(), inner(node)
    if is_of_parameters(node):
        return replace(outside, kind="constant")
    if name in SUMS:
        return replace(_summed(within[0], outside), shape=shape_of(within[0]))
    if name in MEANS:
        before = _summed(within[0], outside)
        return LiveTerm("mean", (*before.below, _num_reduced(node)), before.above)
    reduction = getattr(node, "_saved_reduction", None)
    if reduction == _SUM:
        return replace(outside, shape=shape_of(within[0]))
    if reduction == _MEAN:
        own = saved(node, "_saved_total_weight") if name in LABELLED else float(size_of(within[0]))
        return LiveTerm("mean", (*outside.below, own), outside.above)
    if not any(map(shape_of, within)):
        raise _UnclearError
    return replace(outside, kind="unknown")


def _summed(edge: Edge, outside: LiveTerm) -> LiveTerm:
    """With what was divided by before: numbers, and a mean over samples as in `x.mean(0).sum()`."""
    node, found = edge[0], outside
    for _ in range(MAX_NODES):
        if is_product_with_number(node):
            found = _scaled(node, found)
        elif node.name() == "MeanBackward1" and 0 in dims_of(node):
            return LiveTerm("mean", (*found.below, float(node._saved_self_sym_sizes[0])), found.above)
        elif node.name() not in PASSING:
            break
        node = inner(node)[0][0]
    return found


def _num_reduced(node: Node) -> float:
    """Of how many numbers a mean was taken."""
    sizes = node._saved_self_sym_sizes
    dims = dims_of(node) if node.name() == "MeanBackward1" else range(len(sizes))
    return float(math.prod(sizes[dim] for dim in dims))
