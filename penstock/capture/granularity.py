"""Selects the modules that stay whole in a record (blocks); all others are opened, to record the calls inside them."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.ir import Graph

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Granularity:
    """How far modules are opened: the options `depth` and `basic_blocks` of everything that captures a model.

    By default the elements of the outermost lists of modules are blocks, and so are modules of torch.nn and modules
    that have parameters but no submodules. With `depth`, every module that many levels down is a block. `basic_blocks`,
    names or classes, are blocks wherever they are; modules named in `opened` never are.

    A module without a forward, such as a ModuleList, is never called: it cannot be a block and does not count as a
    level, but its elements do.
    """

    depth: int | None = None
    basic_blocks: Sequence[str | type] = ()
    opened: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.depth is not None and not (type(self.depth) is int and self.depth >= 1):
            raise CaptureError("depth must be 1 or more: the model itself is depth 0", depth=repr(self.depth))
        blocks = self.basic_blocks
        if isinstance(blocks, str) or not isinstance(blocks, Collection):
            raise CaptureError(
                "basic_blocks must be a list of module names and classes",
                got=getattr(blocks, "__name__", repr(blocks)),
                hint="basic_blocks=[...]",
            )
        for block in blocks:
            if not isinstance(block, str | type):
                raise CaptureError(
                    "a basic block must be the name of a module or a class",
                    basic_block=repr(block).partition("\n")[0],
                    hint="a name of named_modules(), or the class of the module",
                )
        object.__setattr__(self, "basic_blocks", tuple(blocks))

    @classmethod
    def of(cls, graph: Graph) -> "Granularity":
        """The granularity with which a graph was recorded, as far as the graph shows."""
        blocks = tuple(dict.fromkeys(node.module for node in graph.nodes if node.is_block))
        scopes = {node.module for node in graph.nodes if not node.is_block}
        around = {module for name in (*blocks, *scopes) for module in outer_modules(name)}
        return cls(basic_blocks=blocks, opened=frozenset((around | scopes) - set(blocks)))

    def merged(self, model: nn.Module, other: "Granularity") -> "Granularity":
        """The granularity with the basic blocks of `other` added; `other` itself if it has a depth."""
        if other.depth is not None:
            return other
        kept = {name for name, module in model.named_modules() if other._is_basic_block(module, name)}
        return replace(self, basic_blocks=(*self.basic_blocks, *other.basic_blocks), opened=self.opened - kept)

    def blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """The blocks of a model by name; raises a CaptureError if a basic block is not in it or has no forward."""
        found = self.find_blocks(model)
        modules: dict[object, nn.Module] = {}
        for name, module in model.named_modules() if self.basic_blocks else ():
            for key in (name, type(module), type(module).__name__) if name else ():
                modules.setdefault(key, module)
        for block in self.basic_blocks:
            if block in ("", type(model), type(model).__name__) and block not in modules:
                raise CaptureError(
                    "the model itself cannot be a basic block: it would be a single node",
                    basic_block=block,
                    hint="the name or class of a module in it",
                )
            if block not in modules:
                problem = "a basic block must be the name or the class of a module in the model"
                raise CaptureError(problem, basic_block=block, hint="a name of named_modules()")
            if not _can_be_called(modules[block]):
                parts = [name for name, part in modules[block].named_children() if _can_be_called(part)]
                inside = f"{block}.{parts[0]}" if isinstance(block, str) and parts else "the modules in it"
                raise CaptureError(
                    "a basic block must be a module that is called, and this one has no forward",
                    basic_block=block,
                    kind=type(modules[block]).__name__,
                    hint=f"basic_blocks=[...] with {inside}, or with their class",
                )
        return found

    def find_blocks(self, model: nn.Module) -> dict[str, nn.Module]:
        """The blocks of a model by name, as `blocks` returns them but without its checks, which take longer."""
        return dict(self._visit(model, "", 0, in_list=False))

    def open_like(self, model: nn.Module, block: str, around: str = "") -> "Granularity":
        """The same granularity with a block, and all blocks of its class in the module `around`, opened."""
        found, prefix = self.find_blocks(model), f"{around}." if around else ""
        names = (name for name, module in found.items() if type(module) is type(found[block]))
        return replace(self, opened=self.opened | {name for name in names if name.startswith(prefix)})

    def _visit(self, module: nn.Module, path: str, level: int, in_list: bool) -> Iterator[tuple[str, nn.Module]]:
        is_callable = _can_be_called(module)
        if is_callable and path not in self.opened and self._is_block(module, path, level, in_list):
            yield path, module
            return
        children = list(module.named_children())
        # A list of one is only a wrapper: its element is treated like any other module.
        is_list = isinstance(module, _CONTAINERS) and len(children) > 1
        if not is_callable and path:
            # A module that is never called does not count as a level. In a list, its elements count as the list's own.
            level, is_list = level - 1, is_list or in_list
        for name, child in children:
            yield from self._visit(child, f"{path}.{name}" if path else name, level + 1, is_list)

    def _is_block(self, module: nn.Module, path: str, level: int, in_list: bool) -> bool:
        if self.basic_blocks and self._is_basic_block(module, path):
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
        # A container inside, as in nn.Transformer: its elements are the blocks.
        is_plain = not any(isinstance(part, _CONTAINERS) for part in module.modules())
        is_from_torch = type(module).__module__.startswith("torch.nn") and is_plain
        return is_from_torch or (has_parameters and not any(True for _ in module.children()))

    def _is_basic_block(self, module: nn.Module, path: str) -> bool:
        # The model itself is none, also if it has the class of modules in it, as a Sequential of Sequentials.
        return path != "" and any(name in self.basic_blocks for name in (path, type(module), type(module).__name__))


def outer_modules(path: str) -> list[str]:
    """The names of the modules around the one at a path, outermost first: "", "a", "a.b" for "a.b.c"."""
    words = path.split(".")
    return [".".join(words[:end]) for end in range(len(words))]


def _can_be_called(module: nn.Module) -> bool:
    """Whether a module has a forward; a ModuleList, a ModuleDict or a bare nn.Module only holds other modules."""
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return True
    return type(module).forward is not nn.Module.forward or type(module).__call__ is not nn.Module.__call__
