"""Recompute: a block that keeps nothing but what it was given, and runs again when backward needs the rest."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.ir import Graph

Block = Callable[..., Any]
State = list[tuple[nn.Module, str, Tensor]]


class Recompute:
    """Prepares the blocks of a stage, told by their nodes in a graph, to be run again in backward.

    A block draws the same random numbers again. Its second run works on copies of the buffers that it writes, as they
    were at the first: they are written once, and what is read from them is the same. Its hooks are called again, too.
    """

    def __init__(self, stage: nn.Module, graph: Graph) -> None:
        self._stage, self._graph = stage, graph
        # What is written in place is not what it was when the block runs again.
        self._writers = {writer for group in graph.storage for writer in group.writers}

    def __call__(self, node: str, block: Block) -> Block:
        """The block, or what is to be called in its place."""
        buffers = {value.name for value in self._graph.buffers}
        updates = [name for update in self._graph.updates if update.node == node for name in update.names]
        if node in self._writers or not buffers.issuperset(updates):
            return block
        owners = [(self._stage.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in updates]

        def call(*args: Any, **kwargs: Any) -> Any:
            before = [(owner, name, getattr(owner, name).clone()) for owner, name in owners]
            return checkpoint(_run(block, before), args, kwargs, use_reentrant=False)

        return call


def _run(block: Block, before: State) -> Callable[[Any, Any], Any]:
    """The first call of what this returns runs the block, any other repeats that."""
    is_first = True

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return block(*args, **kwargs)
        with _as_before(before):
            return block(*args, **kwargs)

    return run


@contextmanager
def _as_before(before: State) -> Iterator[None]:
    now = [(owner, name, getattr(owner, name)) for owner, name, _ in before]
    try:
        for owner, name, buffer in before:
            setattr(owner, name, buffer.clone())
        yield
    finally:
        for owner, name, buffer in now:
            setattr(owner, name, buffer)
