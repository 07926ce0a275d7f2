"""Skeleton: some modules and parameters of a model in a tree of their own, under their original names."""

from collections.abc import Iterable

from torch import nn


def fill(tree: nn.Module, model: nn.Module, modules: Iterable[str], state: Iterable[str]) -> None:
    """Hang modules, and single parameters and buffers, of the model into the tree where they are in the model."""
    for path in modules:
        parent, _, name = path.rpartition(".")
        _branch(tree, parent).add_module(name, model.get_submodule(path))
    for path in state:
        parent, _, name = path.rpartition(".")
        owner, branch = model.get_submodule(parent), _branch(tree, parent)
        if branch is owner or name in branch._parameters or name in branch._buffers:
            continue
        if name in owner._parameters:
            branch.register_parameter(name, owner._parameters[name])
        elif name in owner._buffers:
            branch.register_buffer(name, owner._buffers[name], persistent=name not in owner._non_persistent_buffers_set)


def _branch(tree: nn.Module, path: str) -> nn.Module:
    """The module at a path, made of empty ones where there is none yet."""
    for name in path.split(".") if path else ():
        if name not in tree._modules:
            tree.add_module(name, nn.Module())
        tree = tree._modules[name]  # type: ignore[assignment]
    return tree
