"""Python names in a generated file: variables of values, and the names under which functions and classes are imported.

Every name of a model is data. It becomes an identifier only if it is one; otherwise it appears in a string literal.
"""

import builtins
import keyword
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import resolve_name

from penstock.capture import Recording
from penstock.codegen import support
from penstock.ir import Call

_MAX_LENGTH = 32
_FILE_NAMES = ("self", "model", "args", "kwargs", "given", "run", "PLACEMENT", "STAGES", "TIED", "CONSTANTS")
# Torch's modules name their argument `input`, so callers may pass it by that name; generated code never calls input().
_RESERVED = frozenset((*_FILE_NAMES, *vars(support), *dir(builtins), *keyword.softkwlist)) - {"input"}
_STAGE_NAME = re.compile(r"Stage\d+", re.ASCII)
_BLOCK_NAME = re.compile(r"(?:^|\.)([A-Za-z_]\w*(?:\.\d+)*)$", re.ASCII)
"""the end of a module name from the last word that is not an index: `layers.0` of `model.layers.0`"""


def is_identifier(name: str) -> bool:
    """Whether a name can appear in code as it is; keywords and names outside of ASCII cannot."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def is_index(word: str) -> bool:
    """Whether a part of a dotted name is the index of a list of modules."""
    return word.isascii() and word.isdecimal() and (word == "0" or not word.startswith("0"))


def is_plain_path(path: str) -> bool:
    """Whether a dotted module name can appear in a comment or docstring as it is."""
    return all(is_identifier(word) or is_index(word) for word in path.split("."))


class Names:
    """The names of a generated file: unique names for values, and those of imported functions and classes."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._numbers: Counter[str] = Counter()
        self._imported: dict[tuple[str, str], str] = {}
        """by module and name in it"""

    def fresh(self, base: str) -> str:
        """The base name, or a free name close to it."""
        base = base.strip("_")[:_MAX_LENGTH].strip("_")
        base = base if is_identifier(base) else "value"
        found = f"{base}_" if base in _RESERVED or _STAGE_NAME.fullmatch(base) else base
        while found in self._used:
            self._numbers[base] += 1
            found = f"{base}_{self._numbers[base] + 1}"
        self._used.add(found)
        return found

    def imported(self, thing: Any) -> str | None:
        """The dotted name of a function or class; None if no name refers to this object."""
        if (applied := applied_function(thing)) is not None:
            owner = self.imported(applied)
            return f"{owner}.apply" if owner else None
        for module, path in _places(thing):
            if not all(map(is_identifier, module.split("."))) or not _refers(sys.modules.get(module), path, thing):
                continue
            if module in ("builtins", "torch"):
                return path if module == "builtins" else f"torch.{path}"
            first, dot, rest = path.partition(".")
            if (module, first) not in self._imported:
                self._imported[module, first] = self.fresh(first)
            return f"{self._imported[module, first]}{dot}{rest}"
        return None

    @property
    def import_lines(self) -> list[str]:
        """The import statements, in the order of the modules."""
        found: dict[str, list[str]] = {}
        for (module, name), known in sorted(self._imported.items()):
            found.setdefault(module, []).append(name if name == known else f"{name} as {known}")
        return [f"from {module} import {', '.join(names)}" for module, names in found.items()]


def name_values(recording: Recording, names: Names) -> dict[str, str]:
    """A variable for every value of a recording; a value that is written in place keeps its variable."""
    graph = recording.graph
    found: dict[str, str] = {}
    for value in graph.inputs:
        words = [word for word in value.name.split(".") if is_identifier(f"_{word}")]
        found[value.name] = names.fresh("_".join(words))
    for step in recording.record.steps:
        if not isinstance(step, Call):
            continue
        found |= {new: found[old] for new, old in step.writes}
        found |= {new: names.fresh(buffer.rpartition(".")[2]) for new, buffer in step.results.updates}
        # A readable name: `layers_0`, `embed_tokens`, `mul`.
        node = graph[step.name]
        base = node.kind
        if node.is_block:
            end = _BLOCK_NAME.search(node.module)
            base = (end[1] if end else f"{node.kind.lower()}_{node.module}").replace(".", "_")
        new = [value for value in dict.fromkeys(step.results.values) if value and value not in found]
        for place, value in enumerate(new):
            found[value] = names.fresh(base if len(new) == 1 else f"{base}_{place}")
    return found


def tensor_attribute(function: Any) -> str | None:
    """The name of a method of tensors, or of an attribute followed by `.__get__` or `.__set__`."""
    name = resolve_name(function) or ""
    if not name.startswith("torch.Tensor."):
        return None
    # Torch has some methods under two names.
    for found in (name.removeprefix("torch.Tensor."), str(getattr(function, "__name__", ""))):
        if _refers(torch.Tensor, found, function):
            return found
    return None


def applied_function(function: Any) -> type | None:
    """The autograd function whose `apply` was recorded."""
    found = getattr(function, "function", None)
    return found if isinstance(found, type) and issubclass(found, torch.autograd.Function) else None


def _places(thing: Any) -> Iterator[tuple[str, str]]:
    """The modules and dotted names under which a function or class may be importable, the most readable first."""
    if isinstance(thing, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        yield "torch", f"ops.{thing}"
    elif isinstance(thing, torch.jit.ScriptFunction):
        # A scripted function replaces, in its module, the function that it was made from.
        module, _, name = str(thing.qualified_name).removeprefix("__torch__.").rpartition(".")
        yield module, name
    elif not isinstance(thing, type):
        # Private functions have no name in `resolve_name`, but may be found under their own.
        name = resolve_name(thing) or f"torch.{getattr(thing, '__name__', '')}"
        if name.startswith("torch.nn.functional."):
            yield "torch.nn", name.removeprefix("torch.nn.")
        elif name.startswith("torch."):
            # Functions that are defined in a module of torch are mostly offered by torch itself as well.
            yield "torch", name.rpartition(".")[2]
            yield "torch", name.removeprefix("torch.")
    yield str(getattr(thing, "__module__", None) or "builtins"), str(getattr(thing, "__qualname__", ""))


def _refers(owner: Any, path: str, thing: Any) -> bool:
    """Whether a dotted name in a module or class is that of an object."""
    for word in path.split("."):
        owner = getattr(owner, word, None) if is_identifier(word) else None
    # Every access to a method of an object makes a new bound method.
    return owner is thing or (type(owner) is type(thing) and hasattr(owner, "__self__") and bool(owner == thing))
