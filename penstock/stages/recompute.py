"""Activation recomputation: a block saves only its arguments, and runs again when backward needs the rest."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.ir import Graph

Block = Callable[..., Any]


class Recompute:
    """Wraps the blocks of a stage in torch's checkpoint, as a `wrap` of `Replay`.

    The second run draws the same random numbers. It works on copies of the buffers that the block writes, as they were
    before the first run: buffers are updated once and read with the same content. Hooks run again too.
    """

    def __init__(self, stage: nn.Module, graph: Graph) -> None:
        self._stage, self._graph = stage, graph
        self._buffers = {value.name for value in graph.buffers}
        # An argument that is written in place has another content when the block runs again.
        self._writers = {writer for group in graph.storage for writer in group.writers}

    def __call__(self, node: str, block: Block) -> Block:
        """The function to be called in place of a block: the block itself if it cannot be run again."""
        updates = [name for update in self._graph.updates if update.node == node for name in update.names]
        if node in self._writers or not self._buffers.issuperset(updates):
            return block
        owners = [(self._stage.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in updates]

        def call(*args: Any, **kwargs: Any) -> Any:
            before = [getattr(owner, name).clone() for owner, name in owners]
            is_first = True

            def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                nonlocal is_first
                if is_first:
                    is_first = False
                    return block(*args, **kwargs)
                after = [getattr(owner, name) for owner, name in owners]
                try:
                    for (owner, name), buffer in zip(owners, before, strict=True):
                        # A copy, because the block may run more than once again.
                        setattr(owner, name, buffer.clone())
                    return block(*args, **kwargs)
                finally:
                    for (owner, name), buffer in zip(owners, after, strict=True):
                        setattr(owner, name, buffer)

            return checkpoint(run, args, kwargs, use_reentrant=False)

        return call
