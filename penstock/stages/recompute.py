"""Activation recomputation: a block saves only its arguments, and runs again when backward needs the rest."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.ir import Graph

Block = Callable[..., Any]


def recomputed(stage: nn.Module, graph: Graph, node: str, block: Block) -> Block:
    """The function to be called in place of a block of a stage: the block itself if it cannot be run again.

    It wraps the block in torch's checkpoint. The second run draws the same random numbers. It works on copies of the
    buffers that the block writes, as they were before the first run: buffers are updated once and read with the same
    content. Hooks run again too.
    """
    updates = [name for update in graph.updates if update.node == node for name in update.names]
    # An argument that is written in place has another content when the block runs again.
    writes_values = any(node in group.writers for group in graph.storage)
    if writes_values or not {value.name for value in graph.buffers}.issuperset(updates):
        return block
    owners = [(stage.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in updates]

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
