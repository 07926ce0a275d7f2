"""Way: which way a loss function took, told by the autograd graph that it left behind."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from penstock.ir import leaves

_MAX_NODES = 256
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_SETTINGS = ("_saved_reduction", "_saved_ignore_index")
_HAVE_SETTINGS: dict[str, tuple[str, ...]] = {}
"""by the name of a node, which of the settings it has"""

Way = tuple[object, ...]


def way_of(loss: Tensor, output: Any) -> Way:
    """The functions from an output to its loss with how they reduce; equal for calls that went the same way."""
    found: list[object] = []
    for node in _between(loss, output, _MAX_NODES):
        name = node.name()
        settings = _HAVE_SETTINGS.get(name)
        if settings is None:
            settings = _HAVE_SETTINGS[name] = tuple(setting for setting in _SETTINGS if hasattr(node, setting))
        found.append((name, *(getattr(node, setting) for setting in settings)) if settings else name)
    return tuple(found)


def parameters_of(loss: Tensor, output: Any) -> list[nn.Parameter]:
    """The parameters that a loss reaches by other ways than through the output."""
    reached = (node.variable for node in _between(loss, output) if node.name() == _ACCUMULATE)
    return [tensor for tensor in reached if isinstance(tensor, nn.Parameter)]


def coarsest(loss: Tensor) -> torch.dtype:
    """The type of the lowest precision among what a loss is made of."""
    found = [loss.dtype]
    for node in _between(loss, ()):
        found += [made.dtype for made in node._input_metadata if made.dtype.is_floating_point]
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)


def _between(loss: Tensor, output: Any, limit: int | None = None) -> Iterator[Any]:
    """The nodes from a loss back to what an output was made by, each once and always in the same order."""
    tensors = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
    # Held, as a node of which nobody holds an object has another one the next time.
    ends = {tensor.grad_fn for tensor in tensors} | {None}
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting and (limit is None or len(seen) < limit):
        node = waiting.pop()
        if node in ends or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [inner for inner, _ in node.next_functions]
