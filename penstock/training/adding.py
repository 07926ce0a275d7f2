"""Adding: losses that a module inside the model adds to the one of its output."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from penstock.ir.graph import Graph, Node

_COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("penstock_added_losses", default=None)


def add_loss(value: Tensor) -> None:
    """Add a scalar to the loss, from inside a module's forward: a penalty, a router's balance.

    Under a Pipeline its gradient and value count as in one process, each microbatch by its samples. Elsewhere it does
    nothing, unless `added_losses` collects.
    """
    if has_torch_function_unary(value):
        handle_torch_function(added_loss, (value,), value)
    else:
        added_loss(value)


def added_loss(value: Tensor) -> Tensor:
    """What is recorded between blocks, as any function of torch that makes a tensor, and so runs again in its stage."""
    collected = _COLLECTED.get()
    if collected is not None:
        collected.append(value)
    return value.clone()


def added_in(graph: Graph) -> tuple[str, ...]:
    """The values that are added to the loss between the blocks of a model, and results of blocks that nobody reads.

    A block whose result is not used may have been called for the loss that it adds.
    """
    read = {name for node in graph.nodes for name in node.reads} | set(graph.outputs)
    adding = (node for node in graph.nodes if node.kind == added_loss.__name__ or _is_unread(node, read))
    return tuple(value.name for node in adding for value in node.makes)


def _is_unread(node: Node, read: Collection[str]) -> bool:
    return node.is_leaf and not any(value.name in read for value in node.makes)


@contextmanager
def added_losses() -> Iterator[list[Tensor]]:
    """Collect what `add_loss` is given inside: `with added_losses() as extra: ...; loss = loss + sum(extra)`."""
    collected: list[Tensor] = []
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)
