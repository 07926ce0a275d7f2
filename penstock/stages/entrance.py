"""Entrance: values that came from other stages, as the start of a graph that ends with their gradients."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_ANCHOR = torch.zeros(0, requires_grad=True)
"""makes the values need a gradient; gets none itself"""


class Entrance(Function):
    """Lets tensors into a graph; their gradients go to a dictionary, as they are and not added to anything."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, values: dict[str, Tensor], returned: dict[str, Tensor | None]) -> Any:
        """The values come in a dictionary, as arguments would not be let in as they are."""
        ctx.set_materialize_grads(False)
        ctx.names, ctx.returned = tuple(values), returned
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.returned.update(zip(ctx.names, gradients, strict=True))
        return None, None, None


def enter(incoming: Mapping[str, Any], written: Collection[str], returned: dict[str, Tensor | None]) -> dict[str, Any]:
    """The values as a stage may use them; `returned` gets a place for the gradient of each that has one.

    What is written in place is given as a copy. Neither kind is a leaf or a view, which could not be written.
    """
    given, wanted = {}, {}
    for name, value in incoming.items():
        given[name] = value
        if isinstance(value, Tensor):
            given[name] = own = value.detach().clone() if name in written else value.data
            if value.requires_grad:
                wanted[name] = own
    if wanted:
        returned.update(dict.fromkeys(wanted))
        entered = Entrance.apply(_ANCHOR, wanted, returned)  # type: ignore[no-untyped-call]
        given.update(zip(wanted, entered, strict=True))
    return given
