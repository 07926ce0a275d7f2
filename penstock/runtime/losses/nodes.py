"""Nodes: what the nodes of an autograd graph tell about the functions that made them."""

import math
from typing import Any

from torch import Tensor, nn

Node = Any
"""of an autograd graph"""
Edge = tuple[Node, int]
"""a node, and which of its results"""
MAX_NODES = 64
"""how many are looked at"""
# fmt: off
PASSING = frozenset((
    "NegBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "CloneBackward0", "AliasBackward0",
    "ToCopyBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0", "TBackward0",
    "ExpandBackward0", "PermuteBackward0", "TransposeBackward0", "SelectBackward0", "AsStridedBackward0",
))
"""functions of one number that keep it, up to its sign, type and form"""
ADDING = frozenset(("AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "RsubBackward1"))
STACKING = frozenset(("StackBackward0", "CatBackward0"))
SUMS = frozenset(("SumBackward0", "SumBackward1"))
MEANS = frozenset(("MeanBackward0", "MeanBackward1"))
LABELLED = frozenset(("NllLossBackward0", "NllLoss2DBackward0", "NllLossNdBackward0"))
_OVER_ROWS = frozenset((
    "SumBackward1", "MeanBackward1", "SoftmaxBackward0", "LogSoftmaxBackward0", "CumsumBackward0", "VarBackward0",
    "StdBackward0", "LogsumexpBackward0", "MaxBackward0", "AmaxBackward0",
))
_ELEMENTWISE = PASSING | ADDING | STACKING | frozenset((
    "PowBackward0", "PowBackward1", "AbsBackward0", "MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1",
    "ExpBackward0", "LogBackward0", "SqrtBackward0", "ClampBackward1", "ReluBackward0", "TanhBackward0",
    "SigmoidBackward0", "SoftplusBackward0", "SliceBackward0", "SignBackward0", "Log1PBackward0", "XlogyBackward0",
))
_OF_PARAMETERS = _ELEMENTWISE | SUMS | MEANS | frozenset((
    "NormBackward0", "NormBackward1", "LinalgVectorNormBackward0", "MmBackward0", "LogsumexpBackward0", "MaxBackward1",
))
# fmt: on


def inner(node: Node) -> list[Edge]:
    """What has a gradient among that of which a node made its result."""
    return [edge for edge in node.next_functions if edge[0] is not None]


def shape_of(edge: Edge) -> tuple[int, ...]:
    """Of what a node made in the forward."""
    return tuple(edge[0]._input_metadata[edge[1]].shape)


def size_of(edge: Edge) -> int:
    """How many numbers that are."""
    return math.prod(shape_of(edge))


def is_number(edge: Edge) -> bool:
    """Whether a node made a number, which may have got dimensions since; one of a single sample always had some."""
    while shape_of(edge):
        found = inner(edge[0])
        if size_of(edge) != 1 or edge[0].name() not in PASSING or len(found) != 1:
            return False
        (edge,) = found
    return True


def saved(node: Node, name: str) -> Tensor | None:
    """A tensor that a node has saved; None if hooks keep it: inside a checkpoint, asking would compute it again."""
    raw = getattr(node, f"_raw{name}", None)
    return None if raw is None or raw.unpack_hook is not None else getattr(node, name)


def dims_of(node: Node) -> set[int]:
    """The dimensions over which a node goes."""
    num_dims = len(shape_of(node.next_functions[0]))
    dims = getattr(node, "_saved_dim", None)
    listed = dims if isinstance(dims, tuple | list) else range(num_dims) if dims is None else (dims,)
    return {_signed(dim) % num_dims for dim in listed} if num_dims else set()


def _signed(number: int) -> int:
    """Torch shows negative numbers that a node has saved as large ones."""
    return number - (1 << 64) if number >= 1 << 63 else number


def is_product_with_number(node: Node) -> bool:
    """Whether what has a gradient is multiplied with, or divided by, a number that has none."""
    name = node.name()
    if name in ("MulBackward1", "DivBackward1"):
        return True
    sides = [side is not None for side, _ in node.next_functions]
    if name not in ("MulBackward0", "DivBackward0") or all(sides) or (name == "DivBackward0" and not sides[0]):
        return False
    other = saved(node, "_saved_other" if sides[0] else "_saved_self")
    return other is not None and not other.dim()


def is_of_parameters(node: Node) -> bool:
    """Whether a node is made of parameters by functions of them alone, so that it is the same for every microbatch."""
    waiting, seen = [node], set[Node]()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        name = one.name()
        if name == "torch::autograd::AccumulateGrad":
            if not isinstance(one.variable, nn.Parameter):
                return False
        elif len(seen) > MAX_NODES or name not in _OF_PARAMETERS or _is_given_data(one, name):
            return False
        waiting += [edge[0] for edge in inner(one)]
    return True


def _is_given_data(node: Node, name: str) -> bool:
    """Whether one side of a product is a tensor without gradient, which may be of the batch."""
    missing = [place for place, (side, _) in enumerate(node.next_functions) if side is None]
    if not missing or name not in ("MulBackward0", "DivBackward0", "MmBackward0"):
        return False
    if name == "MmBackward0":
        return True
    other = saved(node, "_saved_other" if missing[0] else "_saved_self")
    return other is None or other.numel() != 1


def couples_rows(value: Tensor) -> bool:
    """Whether a value is made of something that was taken over its first dimension, as the load of experts is.

    A sum of such sums is none. Looked at is what lies between the value and the last products with parameters.
    """
    waiting, seen = [(value.grad_fn, False)], set[tuple[Node, bool]]()
    while waiting:
        node, is_bent = waiting.pop()
        if node is None or (node, is_bent) in seen or len(seen) >= MAX_NODES:
            continue
        seen.add((node, is_bent))
        name = node.name()
        is_sum = name in SUMS | MEANS
        if name in _OVER_ROWS and 0 in dims_of(node) and (is_bent or not is_sum):
            return True
        if name in _ELEMENTWISE or name in _OVER_ROWS or is_sum:
            is_straight = is_sum or name in PASSING or name in ADDING or is_product_with_number(node)
            waiting += [(side, is_bent or not is_straight) for side, _ in node.next_functions]
    return False
