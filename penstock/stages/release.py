"""Release: computes the weight gradients that were put off, and hands them to autograd."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from penstock.stages.deferred import Deferred

_PORTION_BYTES = 1 << 20
"""of gradients that are in memory at once: few engine calls for small ones, little memory for large ones"""
_GO = torch.ones(())
_NUM_CHAINS = 8
"""kept at most: parts of a model that are used by turns need one for every combination"""

Key = tuple[object, ...]
"""the parameters whose gradients wait, in their order"""
Chain = tuple[list[Deferred], Tensor]


class Portion(Function):
    """A node before the weights of some deferred gradients; its backward computes them, then the next portion."""

    @staticmethod
    def forward(ctx: Any, after: Tensor, queue: list[Deferred], number: int, *weights: Tensor) -> Tensor:
        """What it returns is only there to start from."""
        ctx.queue, ctx.number = queue, number
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, go: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [go, None, None]
        for _ in range(ctx.number):
            gradients += ctx.queue.pop().gradients()
        return tuple(gradients)


class Release:
    """Empties queues of deferred gradients. The nodes in front of parameters are made once and used again.

    Each parameter gets its gradients in the order of the queue, through autograd: hooks on it are called as ever.
    """

    __slots__ = ("_chains", "_looked_at", "note")

    def __init__(self) -> None:
        self._chains: dict[Key, Chain] = {}
        self.note, self._looked_at = "", -1

    def __reduce__(self) -> tuple[type["Release"], tuple[()]]:
        # Nodes of autograd are neither copied nor saved with a stage.
        return Release, ()

    def look(self, parameters: Callable[[], Iterable[Tensor]], queue: list[Deferred]) -> None:
        """Note how much of the weight gradients waits, whenever that is another number of calls than before."""
        if len(queue) != self._looked_at:
            self._looked_at = len(queue)
            self.note = note_on(parameters(), queue)

    def run(self, queue: list[Deferred]) -> None:
        """Accumulate all gradients that wait, and empty the queue."""
        if not queue:
            return
        if _is_plain(queue):
            accumulate(queue)
            return
        key = _key_of(queue)
        waiting, start = self._chains.get(key) or self._made(key, queue)
        waiting[:] = reversed(queue)
        queue.clear()
        try:
            torch.autograd.backward(start, _GO, retain_graph=True)
        finally:
            waiting.clear()

    def _made(self, key: Key, queue: list[Deferred]) -> Chain:
        chain = _chain(queue)
        # A view of a parameter is another in every forward.
        if all(weight.is_leaf for deferred in queue for weight in deferred.weights):
            if len(self._chains) >= _NUM_CHAINS:
                self._chains.clear()
            self._chains[key] = chain
        return chain


def _is_plain(queue: list[Deferred]) -> bool:
    """Whether every weight is one parameter without hooks, used once: then autograd would do nothing but add."""
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
def accumulate(queue: list[Deferred]) -> None:
    """Add all gradients that wait, first come first, each as soon as it is computed; empties the queue."""
    for deferred in queue:
        for weight, gradient in zip(deferred.weights, deferred.gradients(), strict=True):
            kept = weight.grad
            if kept is not None:
                kept.add_(gradient)
            elif gradient.dtype == weight.dtype and gradient.stride() == weight.stride():
                weight.grad = gradient
            else:
                weight.grad = torch.empty_like(weight).copy_(gradient)
        deferred.forget()
    queue.clear()


def _key_of(queue: list[Deferred]) -> Key:
    """A parameter that changes its type or device gets another place in autograd."""
    weights = [weight for deferred in queue for weight in deferred.weights]
    return (*map(id, weights), *[weight.dtype for weight in weights], weights[0].device if weights else None)


def note_on(parameters: Iterable[Tensor], queue: list[Deferred]) -> str:
    """What to say if less than half of the trained weights wait in a queue."""
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    waiting = sum({id(weight): weight.numel() for deferred in queue for weight in deferred.weights}.values())
    if 2 * waiting >= trained:
        return ""
    share = f"only {waiting / trained:.0%}" if waiting else "none"
    return (
        f"{share} of the weight gradients can be put off, the others are computed with the input gradients: blocks "
        "that are compiled or recomputed by a reentrant checkpoint, and functions other than products, convolutions "
        "and embeddings, compute both at once"
    )


def _chain(queue: list[Deferred]) -> Chain:
    """Nodes for all that wait, the first of the queue first: each is done with its memory before the next begins."""
    waiting: list[Deferred] = []
    start = torch.zeros(())
    for portion in reversed(_portions(queue)):
        weights = [weight for deferred in portion for weight in deferred.weights]
        start = Portion.apply(start, waiting, len(portion), *weights)  # type: ignore[no-untyped-call]
    return waiting, start


def _portions(queue: list[Deferred]) -> list[list[Deferred]]:
    portions: list[list[Deferred]] = [[]]
    size = 0
    for deferred in queue:
        own = sum(weight.nbytes for weight in deferred.weights)
        if portions[-1] and size + own > _PORTION_BYTES:
            portions.append([])
            size = 0
        portions[-1].append(deferred)
        size += own
    return portions
