"""Which modules stay whole in a record (leaves), and which are opened to record the calls between their parts."""

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

    By default the elements of the outermost lists of modules are leaves, and so are modules of torch.nn and modules
    that have parameters but no submodules. With `depth`, every module that many levels down is a leaf. `basic_blocks`,
    names or classes, are leaves wherever they are; modules named in `opened` never are.
    """

    depth: int | None = None
    basic_blocks: tuple[str | type, ...] = ()
    opened: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graph: Graph) -> "Granularity":
        """The granularity with which a graph was recorded, as far as the graph shows."""
        leaves = tuple(dict.fromkeys(node.module for node in graph.nodes if node.is_leaf))
        scopes = {node.module for node in graph.nodes if not node.is_leaf}
        around = {".".join(name.split(".")[:end]) for name in leaves for end in range(name.count(".") + 1)}
        within = {".".join(name.split(".")[:end]) for name in scopes for end in range(name.count(".") + 2)}
        return cls(basic_blocks=leaves, opened=frozenset((around | within) - set(leaves)))

    def leaves(self, model: nn.Module) -> dict[str, nn.Module]:
        """The leaves of a model by name; raises a CaptureError if a basic block is not in the model."""
        names, classes = dict(model.named_modules()), {type(module) for module in model.modules()}
        known = {*names, *classes, *(kind.__name__ for kind in classes)}
        for block in self.basic_blocks:
            # "" is the name of the model itself.
            if block == "" or block not in known:
                raise CaptureError(
                    "no module of this name or class",
                    basic_block=block,
                    hint="a name of named_modules()",
                )
        return self.find_leaves(model)

    def find_leaves(self, model: nn.Module) -> dict[str, nn.Module]:
        """The leaves of a model for which `leaves` was called before: without its checks."""
        return dict(self._visit(model, "", 0, in_list=False))

    def open_like(self, model: nn.Module, leaf: str) -> "Granularity":
        """The same granularity with a leaf, and all leaves of its class, opened."""
        found = self.leaves(model)
        same_class = {name for name, module in found.items() if type(module) is type(found[leaf])}
        return replace(self, opened=self.opened | same_class)

    def _visit(self, module: nn.Module, path: str, level: int, in_list: bool) -> Iterator[tuple[str, nn.Module]]:
        if path not in self.opened and self._is_leaf(module, path, level, in_list):
            yield path, module
            return
        children = list(module.named_children())
        # A list of one is only a wrapper: its element is treated like any other module.
        is_list = isinstance(module, _CONTAINERS) and len(children) > 1
        for name, child in children:
            yield from self._visit(child, f"{path}.{name}" if path else name, level + 1, is_list)

    def _is_leaf(self, module: nn.Module, path: str, level: int, in_list: bool) -> bool:
        if self.basic_blocks and (path in self.basic_blocks or type(module) in self.basic_blocks):
            return True
        if type(module).__name__ in self.basic_blocks:
            return True
        if path and isinstance(module, torch.jit.ScriptModule):
            # No Python runs inside, so no call could be recorded.
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
