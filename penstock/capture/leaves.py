"""Leaves: which modules stay whole in a record, and which are opened to see what happens between their parts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.ir import Graph

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Granularity:
    """How far modules are opened.

    By default the elements of the outermost lists of modules are leaves, and so are torch's own modules and modules
    with parameters but no parts. With `depth`, every module so many levels down is a leaf. `basic_blocks`, names or
    classes, are leaves wherever they are; `opened` never are.
    """

    depth: int | None = None
    basic_blocks: tuple[str | type, ...] = ()
    opened: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graph: Graph) -> "Granularity":
        """The one with which a graph was recorded, as far as the graph tells."""
        leaves = tuple(dict.fromkeys(node.module for node in graph.nodes if node.is_leaf))
        scopes = {node.module for node in graph.nodes if not node.is_leaf}
        around = {".".join(name.split(".")[:end]) for name in leaves for end in range(name.count(".") + 1)}
        within = {".".join(name.split(".")[:end]) for name in scopes for end in range(name.count(".") + 2)}
        return cls(basic_blocks=leaves, opened=frozenset((around | within) - set(leaves)))

    def leaves(self, model: nn.Module) -> dict[str, nn.Module]:
        """The leaves of a model by name."""
        self._check(model)
        return self.found(model)

    def found(self, model: nn.Module) -> dict[str, nn.Module]:
        """The leaves of a model for which this was checked before."""
        return dict(self._visit(model, "", 0, in_list=False))

    def open_like(self, model: nn.Module, leaf: str) -> "Granularity":
        """The same with a leaf, and all others of its class, opened."""
        found = self.leaves(model)
        alike = {name for name, module in found.items() if type(module) is type(found[leaf])}
        return replace(self, opened=self.opened | alike)

    def _check(self, model: nn.Module) -> None:
        names, classes = dict(model.named_modules()), {type(module) for module in model.modules()}
        for block in self.basic_blocks:
            if block == "" or (
                block not in names and block not in classes and block not in {kind.__name__ for kind in classes}
            ):
                raise CaptureError(
                    "no module of this name or class", basic_block=block, hint="a name of named_modules()"
                )
        if self.depth is not None and not (type(self.depth) is int and self.depth >= 1):
            raise CaptureError("depth must be 1 or more: the model itself is no part of it", depth=self.depth)

    def _visit(self, module: nn.Module, path: str, level: int, in_list: bool) -> Iterator[tuple[str, nn.Module]]:
        if path not in self.opened and self._is_leaf(module, path, level, in_list):
            yield path, module
            return
        children = list(module.named_children())
        # A list of one is only a wrapping: its element is looked at like any other module.
        is_list = isinstance(module, _CONTAINERS) and len(children) > 1
        for name, child in children:
            yield from self._visit(child, f"{path}.{name}" if path else name, level + 1, is_list)

    def _is_leaf(self, module: nn.Module, path: str, level: int, in_list: bool) -> bool:
        if self.basic_blocks and (path in self.basic_blocks or type(module) in self.basic_blocks):
            return True
        if type(module).__name__ in self.basic_blocks:
            return True
        if path and isinstance(module, torch.jit.ScriptModule):
            # What happens inside is not seen.
            return True
        if self.depth is not None:
            return level >= self.depth
        if not path or (isinstance(module, _CONTAINERS) and not in_list):
            return False
        if in_list:
            return True
        has_parameters = any(True for _ in module.parameters(recurse=False))
        is_plain = not any(isinstance(part, _CONTAINERS) for part in module.modules())
        is_torchs = type(module).__module__.startswith("torch.nn") and is_plain
        return is_torchs or (has_parameters and not any(True for _ in module.children()))
