"""The boundary between stages in the autograd graph: where a backward ends and its gradients are handed over."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# A custom Function records a node only if one of its tensor arguments requires a gradient. This one is empty, and its
# own gradient is never computed.
_ANCHOR = torch.zeros(0, requires_grad=True)


class _GradBoundary(Function):
    """Starts a graph with tensors of other stages; backward stores their gradients in a dictionary."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, values: dict[str, Tensor], returned: dict[str, Tensor | None]) -> Any:
        # In a dictionary the tensors are not seen as arguments: autograd would return arguments as views of
        # themselves, and a view of a tensor from outside cannot be written in place.
        ctx.set_materialize_grads(False)
        ctx.names, ctx.returned = tuple(values), returned
        return tuple(values.values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        # Not accumulated into `.grad`: each gradient leaves as autograd computed it.
        ctx.returned.update(zip(ctx.names, gradients, strict=True))
        return None, None, None


def grad_boundary(
    incoming: Mapping[str, Any], written: Collection[str], returned: dict[str, Tensor | None]
) -> dict[str, Any]:
    """Detach values of other stages from their graph and start a new one with them.

    The result has the same names. `returned` gets an entry for every value that requires a gradient; backward fills in
    the gradient. Values in `written` are copied, as the stage writes into them in place. No result is a leaf or a view
    of autograd, neither of which could be written.
    """
    values: dict[str, Any] = dict(incoming)
    differentiable = {}
    for name, value in incoming.items():
        if isinstance(value, Tensor):
            values[name] = own = value.detach().clone() if name in written else value.data
            if value.requires_grad:
                differentiable[name] = own
    if differentiable:
        returned.update(dict.fromkeys(differentiable))
        started = _GradBoundary.apply(_ANCHOR, differentiable, returned)  # type: ignore[no-untyped-call]
        values.update(zip(differentiable, started, strict=True))
    return values
