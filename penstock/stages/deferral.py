"""Deferral: while a stage runs forward, puts off the weight gradients of its products, convolutions and embeddings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from penstock.errors import PartitionError
from penstock.stages.deferred import Compute, Deferred, Weights, begun, kept

GRADIENTS = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
PutOff = Callable[..., Tensor | None]


class Deferral(TorchFunctionMode):
    """Inside it, a call of a function in the table runs as ever, but with its parameters cut off from the graph.

    What their gradients are computed from goes to `queue` when backward comes by, so that backward computes the other
    gradients only. A call that the function's entry in the table leaves alone (it returns None) is not touched.
    """

    def __init__(self, table: dict[Any, PutOff]) -> None:
        super().__init__()
        self.queue: list[Deferred] = []
        self.is_recomputed = False
        """some value is saved by hooks, as inside a checkpoint: backward has to run inside the deferral, too"""
        self.is_forward = False
        """the stage runs forward now: a gradient taken by now would lack what was put off"""
        self._table = table

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A compiler looks through this function: what it compiles is left as it is.
        if not is_compiling():
            if func in GRADIENTS and self.is_forward:
                raise _unforeseen(func)
            put_off = self._table.get(func)
            # Who names the first argument, too, is left alone.
            if put_off is not None and args and torch.is_grad_enabled() and not _is_transformed():
                result = put_off(self, *args, **(kwargs or {}))
                if result is not None:
                    return result
        return func(*args, **kwargs) if kwargs else func(*args)

    def put_off(self, result: Tensor, value: Tensor, weights: Weights, compute: Compute) -> Tensor:
        """The result of a call on a value, to be used in its place; it must be no view."""
        deferred = Deferred(self.queue, weights, compute)
        if not result.requires_grad:
            self.is_recomputed = self.is_recomputed or saves_by_hooks()
            return begun(result, value, deferred)
        if saves_by_hooks():
            self.is_recomputed = True
            return kept(result, value.detach(), deferred)
        deferred.keep(value.detach())
        # Before the node, and not at the tensor: hooks of the user may still change what arrives there.
        result.grad_fn.register_prehook(deferred.arrive)  # type: ignore[union-attr]
        return result


def _is_transformed() -> bool:
    """Whether a function is mapped or differentiated by torch.func: inside, gradients are taken at once."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _unforeseen(func: Any) -> PartitionError:
    return PartitionError(
        "a block takes gradients in its forward, and did not when it was recorded",
        function=func.__name__,
        hint="a schedule that does not split backward, such as 1f1b",
    )


def saves_by_hooks() -> bool:
    """Whether hooks decide about what autograd saves, as inside a checkpoint: then they cannot be disabled."""
    try:
        with disable_saved_tensors_hooks("deferral"):
            return False
    except RuntimeError:
        return True
