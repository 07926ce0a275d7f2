"""Splits backward: weight gradients are deferred while backward computes the gradients of the inputs.

During the forward of a stage a `Deferral` (a torch function mode) replaces products, convolutions and embeddings by a
parameter (`deferred_functions.py`). The same function runs, but on the detached parameter, so autograd computes only
the gradient of the input. When that backward reaches the call, the gradient of its result arrives at a `Deferred`,
which saves it with the input of the call and adds itself to a queue. `DeferredAccumulator` later computes the weight
gradients of the queue. No function of torch is patched, and every number is the one that autograd would have computed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import Function, forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from penstock.capture import GRADIENT_FUNCTIONS
from penstock.errors import PartitionError

Weights = tuple[Tensor, ...]
ComputeGradients = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""(input, gradient of the result) -> gradients of the weights"""
DeferringFunction = Callable[..., Tensor | None]
"""called as `function(deferral, *args, **kwargs)` in place of a torch function; None: call the original"""

ANCHOR = torch.zeros(0, requires_grad=True)
"""an argument of custom Functions: autograd adds a node only if one of the tensor arguments requires a gradient. It is
empty, and its own gradient is never computed"""


class Deferral(TorchFunctionMode):
    """Runs the functions of a table with their parameters detached, and collects their weight gradients in `queue`."""

    def __init__(self, table: dict[Any, DeferringFunction]) -> None:
        super().__init__()
        self.queue: list[Deferred] = []
        self.is_recomputed = False
        """whether some tensor is saved by hooks, as inside a checkpoint: then backward must defer the same calls"""
        self.is_forward = False
        """whether the stage's forward runs now: a gradient taken inside would lack the deferred part. In backward the
        mode is active too, to see the gradients that hooks take"""
        self._table = table

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # torch.compile traces through this method; compiled code is left as it is.
        if not is_compiling():
            if func in GRADIENT_FUNCTIONS:
                if self.is_forward:
                    raise PartitionError(
                        "a block must not take gradients in its forward while weight gradients are deferred",
                        function=func.__name__,
                        hint="a schedule that does not split backward, such as 1f1b",
                    )
                # A hook takes gradients in backward, as implicit layers do.
                length = len(self.queue)
                result = func(*args, **(kwargs or {}))
                if func is torch.autograd.grad or (kwargs or {}).get("inputs") is not None:
                    # Of chosen tensors only: autograd accumulates none into the parameters.
                    del self.queue[length:]
                return result
            defer = self._table.get(func) if self.is_forward or self.is_recomputed else None
            # A call that passes even its first argument by keyword is left alone.
            if defer is not None and args and torch.is_grad_enabled() and not _is_transformed():
                result = defer(self, *args, **(kwargs or {}))
                if result is not None:
                    return result
        return func(*args, **kwargs) if kwargs else func(*args)

    def defer(self, result: Tensor, value: Tensor, weights: Weights, compute: ComputeGradients) -> Tensor:
        """Defer the gradients of `weights` by a call on `value`; returns the tensor to use in place of `result`.

        `result` was computed from the detached weights, and must not be a view.
        """
        deferred = Deferred(self.queue, weights, compute)
        if not result.requires_grad:
            # The input needs no gradient, so there is no node to attach to.
            self.is_recomputed = self.is_recomputed or _has_saved_tensors_hooks()
            return _StartGraph.apply(ANCHOR, [result], value, deferred)
        if _has_saved_tensors_hooks():
            # Inside a checkpoint the input must not be kept here: it is saved through the hooks, and recomputed.
            self.is_recomputed = True
            return _SaveInput.apply(result, value.detach(), deferred)
        deferred.save_input(value.detach())
        # On the node, not on the tensor: hooks of the user on the tensor may still change the gradient.
        result.grad_fn.register_prehook(deferred.enqueue)
        return result


def _is_transformed() -> bool:
    """Whether torch.func (vmap, grad) or forward-mode differentiation is active: it computes gradients at once."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _has_saved_tensors_hooks() -> bool:
    """Whether hooks decide how autograd saves tensors, as inside a checkpoint."""
    try:
        # There is no public query; with hooks active they cannot be disabled.
        with disable_saved_tensors_hooks("deferral"):
            return False
    except RuntimeError:
        return True


class Deferred:
    """The gradients of some weights by one call, to be computed from its input and the gradient of its result.

    It is added to the queue when backward has computed that gradient.
    """

    __slots__ = ("_compute", "_gradient", "_queue", "_value", "_version", "weights")

    def __init__(self, queue: "list[Deferred]", weights: Weights, compute: ComputeGradients) -> None:
        self.weights = weights
        self._queue, self._compute = queue, compute

    def save_input(self, value: Tensor) -> None:
        """Save the input of the call, which must not be written in place from now on."""
        self._value, self._version = value, value._version

    def enqueue(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Save the gradient of the result and add this to the queue; a prehook of the result's autograd node."""
        if gradients[0] is None:
            return
        deferred = self
        if hasattr(self, "_gradient"):
            # A hook runs backward through the call again (retain_graph=True).
            deferred = Deferred(self._queue, self.weights, self._compute)
            deferred._value, deferred._version = self._value, self._version
        deferred._gradient = gradients[0]
        self._queue.append(deferred)

    def free(self) -> None:
        """Free the tensors that the gradients are computed from."""
        del self._value, self._gradient

    def gradients(self) -> tuple[Tensor, ...]:
        """Compute the gradients of the weights."""
        if self._value._version != self._version:
            # As autograd does for tensors that it has saved.
            raise RuntimeError(
                "a tensor needed for a weight gradient has been written in place: it is at version "
                f"{self._value._version}, expected version {self._version}"
            )
        return self._compute(self._value, self._gradient)


class _StartGraph(Function):
    """Makes a result require a gradient where only the detached parameters would."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, result: list[Tensor], value: Tensor, deferred: Deferred) -> Tensor:
        # In a list: autograd would return an argument as a view of itself.
        ctx.deferred = deferred
        ctx.save_for_backward(value)
        return result[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        _enqueue_with_saved_input(ctx, gradient)
        return None, None, None, None


class _SaveInput(Function):
    """Passes a result on, and saves the input of its call as autograd's own functions do."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, value: Tensor, deferred: Deferred) -> Tensor:
        # Dirty, so that the very same tensor is returned, which may be written in place later.
        ctx.deferred = deferred
        ctx.mark_dirty(result)
        ctx.save_for_backward(value)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _enqueue_with_saved_input(ctx, gradient)
        return gradient, None, None


def _enqueue_with_saved_input(ctx: Any, gradient: Tensor) -> None:
    (value,) = ctx.saved_tensors
    ctx.deferred.save_input(value)
    ctx.deferred.enqueue((gradient,))


# Accumulating the deferred gradients

_MAX_BUCKET_BYTES = 1 << 20
"""gradients in memory at once: small gradients share an autograd node, large ones are freed one by one"""
_MAX_CHAINS = 8
"""chains that are kept: a model that uses different parameters in turn needs one for every combination"""
_ONE = torch.ones(())

Chain = tuple[list[Deferred], Tensor]
"""the list that the nodes pop deferred gradients from, and the tensor to start backward from"""


class DeferredAccumulator:
    """Computes deferred gradients and accumulates them into `.grad`, in the order of the queue.

    Parameters with hooks, parameters used more than once and views of parameters get their gradients through autograd,
    so that hooks run as usual. The autograd nodes for that are built once and used again.
    """

    __slots__ = ("_chains", "_last_length", "note")

    def __init__(self) -> None:
        self._chains: dict[tuple[object, ...], Chain] = {}
        self._last_length = -1
        self.note = ""
        """a sentence if less than half of the weights are deferred"""

    def __reduce__(self) -> tuple[type["DeferredAccumulator"], tuple[()]]:
        # Autograd nodes cannot be copied or pickled; a copy builds its own.
        return DeferredAccumulator, ()

    def note_share(self, parameters: Callable[[], Iterable[Tensor]], queue: list[Deferred]) -> None:
        """Set `note` by the share of trained weights in the queue."""
        # Counted only when the length of the queue has changed: it is usually the same in every step.
        if len(queue) == self._last_length:
            return
        self._last_length, self.note = len(queue), ""
        trained = sum(parameter.numel() for parameter in parameters() if parameter.requires_grad)
        deferred_size = sum({id(weight): weight.numel() for deferred in queue for weight in deferred.weights}.values())
        if 2 * deferred_size < trained:
            share = f"only {deferred_size / trained:.0%}" if deferred_size else "none"
            self.note = (
                f"{share} of the weight gradients can be deferred, the "
                "others are computed with the input gradients: blocks that are compiled or recomputed by a reentrant "
                "checkpoint, and functions other than products, convolutions and embeddings, compute both at once"
            )

    def run(self, queue: list[Deferred]) -> None:
        """Accumulate all gradients in the queue, and empty it."""
        if not queue:
            return
        if _needs_no_autograd(queue):
            _accumulate(queue)
            return
        weights = [weight for deferred in queue for weight in deferred.weights]
        # With dtype and device: a parameter that changes these gets a new node in autograd.
        key = (*map(id, weights), *[weight.dtype for weight in weights], weights[0].device if weights else None)
        pending, start = self._chains.get(key) or self._build_chain(key, queue)
        # The nodes pop from the end.
        pending[:] = reversed(queue)
        queue.clear()
        try:
            torch.autograd.backward(start, _ONE, retain_graph=True)
        finally:
            pending.clear()

    def _build_chain(self, key: tuple[object, ...], queue: list[Deferred]) -> Chain:
        """One node for each bucket of the queue, so that its memory is freed before the next is computed."""
        pending: list[Deferred] = []
        start = torch.zeros(())
        for bucket in reversed(_buckets(queue)):
            weights = [weight for deferred in bucket for weight in deferred.weights]
            start = _Bucket.apply(start, pending, len(bucket), *weights)
        # A view of a parameter is a new tensor in every forward: such a chain is never used again.
        if all(weight.is_leaf for deferred in queue for weight in deferred.weights):
            if len(self._chains) >= _MAX_CHAINS:
                self._chains.clear()
            self._chains[key] = pending, start
        return pending, start


class _Bucket(Function):
    """A node whose inputs are the weights of some deferred gradients and the node of the next bucket."""

    @staticmethod
    def forward(ctx: Any, after: Tensor, queue: list[Deferred], number: int, *weights: Tensor) -> Tensor:
        ctx.queue, ctx.number = queue, number
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [gradient, None, None]
        for _ in range(ctx.number):
            gradients += ctx.queue.pop().gradients()
        return tuple(gradients)


def _buckets(queue: list[Deferred]) -> list[list[Deferred]]:
    buckets: list[list[Deferred]] = [[]]
    size = 0
    for deferred in queue:
        nbytes = sum(weight.nbytes for weight in deferred.weights)
        if buckets[-1] and size + nbytes > _MAX_BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(deferred)
        size += nbytes
    return buckets


def _needs_no_autograd(queue: list[Deferred]) -> bool:
    """Whether every weight is a parameter without hooks that is used once: then autograd would only add."""
    seen: set[int] = set()
    for deferred in queue:
        for weight in deferred.weights:
            if (
                id(weight) in seen
                or not weight.is_leaf
                or weight._backward_hooks
                or weight._post_accumulate_grad_hooks
                or type(weight) is not nn.Parameter
            ):
                return False
            seen.add(id(weight))
    return True


@torch.no_grad()
def _accumulate(queue: list[Deferred]) -> None:
    for deferred in queue:
        for weight, gradient in zip(deferred.weights, deferred.gradients(), strict=True):
            accumulated = weight.grad
            if accumulated is not None:
                accumulated.add_(gradient)
            elif gradient.dtype == weight.dtype and gradient.stride() == weight.stride():
                weight.grad = gradient
            else:
                # As autograd does: `.grad` has the dtype and strides of its parameter.
                weight.grad = torch.empty_like(weight).copy_(gradient)
        deferred.free()
    queue.clear()
