"""Python names in a generated file: variables of values, and the names under which functions and classes are imported.

Every name of a model is data. It becomes an identifier only if it is one; otherwise it appears in a string literal.
"""

import builtins
import keyword
import re
import sys
from collections import Counter
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import resolve_name

from penstock.capture import Recording
from penstock.codegen import support
from penstock.ir import Call

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_STAGE = re.compile(r"[Ss]tage[0-9]+", re.ASCII)
_MAX_LENGTH = 32
_KEYWORDS = frozenset((*keyword.kwlist, *keyword.softkwlist))
# fmt: off
BUILT_IN = frozenset(
    {
        "ValueError", "__file__", "any", "bool", "complex", "dict", "float", "frozenset", "getattr", "int",
        "isinstance", "len", "list", "next", "object", "property", "range", "repr", "set", "slice", "sorted",
        "str", "super", "tuple", "type", "vars", "zip",
    }
)
"""the builtins that generated code uses; no variable has one of these names"""
_RESERVED = frozenset(
    {
        "self", "model", "args", "kwargs", "given", "run", "functional", "PLACEMENT", "STAGES", "TIED", "CONSTANTS",
        *vars(support), *BUILT_IN, *_KEYWORDS,
    }
)
# fmt: on


def is_identifier(name: str) -> bool:
    """Whether a name can appear in code as it is; keywords and names outside of ASCII cannot."""
    return _IDENTIFIER.fullmatch(name) is not None and name not in _KEYWORDS


def is_index(word: str) -> bool:
    """Whether a part of a dotted name is the index of a list of modules."""
    return _NUMBER.fullmatch(word) is not None


def is_plain_path(path: str) -> bool:
    """Whether a dotted module name can appear in a comment or docstring as it is."""
    return all(is_identifier(word) or is_index(word) for word in path.split("."))


class Names:
    """Makes unique variable names."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._numbers: Counter[str] = Counter()

    def fresh(self, base: str, *, may_shadow: bool = False) -> str:
        """The base name, or a free name close to it; only inputs and imports may shadow a builtin."""
        base = base.strip("_")
        base = base[:_MAX_LENGTH].strip("_") if is_identifier(base) else "value"
        found = base if may_shadow or not hasattr(builtins, base) else f"{base}_"
        found = found if self._is_free(found) or base in self._used else f"{base}_"
        while not self._is_free(found):
            self._numbers[base] += 1
            found = f"{base}_{self._numbers[base] + 1}"
        self._used.add(found)
        return found

    def _is_free(self, name: str) -> bool:
        return name not in self._used and name not in _RESERVED and not _STAGE.fullmatch(name)


def name_values(recording: Recording, names: Names) -> dict[str, str]:
    """A variable for every value of a recording; a value that is written in place keeps its variable."""
    graph = recording.graph
    found: dict[str, str] = {}
    for value in graph.inputs:
        words = [word for word in value.name.split(".") if is_identifier(f"_{word}")]
        found[value.name] = names.fresh("_".join(words), may_shadow=True)
    for step in recording.record.steps:
        if not isinstance(step, Call):
            continue
        found |= {new: found[old] for new, old in step.writes}
        found |= {new: names.fresh(buffer.rpartition(".")[2]) for new, buffer in step.results.updates}
        new = [value for value in dict.fromkeys(step.results.values) if value and value not in found]
        # A readable name: `layers_0`, `embed_tokens`, `mul`.
        node = graph[step.name]
        words, base = node.module.split("."), node.kind.lower() if node.is_block else node.kind
        if node.is_block and all(is_identifier(f"_{word}") for word in words):
            # From the last word that is not an index: `model.layers.0` is `layers_0`.
            start = max((at for at, word in enumerate(words) if not is_index(word)), default=-1)
            base = "_".join(words[start:] if start >= 0 else [base, *words])
        for place, value in enumerate(new):
            found[value] = names.fresh(base if len(new) == 1 else f"{base}_{place}")
    return found


class Imports:
    """Dotted names for functions and classes, and the import statements that they need."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._known: dict[tuple[str, str], str] = {}

    def path(self, thing: Any) -> str | None:
        """The dotted name of a function or class; None if no name refers to this object."""
        if (applied := applied_function(thing)) is not None:
            owner = self._imported(applied.__module__, applied.__qualname__, applied)
            return f"{owner}.apply" if owner else None
        if isinstance(thing, torch.jit.ScriptFunction):
            # A scripted function replaces, in its module, the function that it was made from.
            module, _, name = str(thing.qualified_name).removeprefix("__torch__.").rpartition(".")
            return self._imported(module, name, thing)
        module = str(getattr(thing, "__module__", None) or "builtins")
        return _torch_path(thing) or self._imported(module, str(getattr(thing, "__qualname__", "")), thing)

    def _imported(self, module: str, path: str, thing: Any) -> str | None:
        if not all(map(is_identifier, (*module.split("."), *path.split(".")))):
            return None
        if not _is_same(_follow(sys.modules.get(module), path), thing):
            return None
        if module == "builtins":
            return path if path in BUILT_IN else None
        if module == "torch":
            return f"torch.{path}"
        first, dot, rest = path.partition(".")
        if (module, first) not in self._known:
            self._known[module, first] = self._names.fresh(first, may_shadow=True)
        return f"{self._known[module, first]}{dot}{rest}"

    @property
    def lines(self) -> list[str]:
        """The import statements, in the order of the modules."""
        found: dict[str, list[str]] = {}
        for (module, name), known in sorted(self._known.items()):
            found.setdefault(module, []).append(name if name == known else f"{name} as {known}")
        return [f"from {module} import {', '.join(names)}" for module, names in found.items()]


def tensor_attribute(function: Any) -> str | None:
    """The name of a method of tensors, or of an attribute followed by `.__get__` or `.__set__`."""
    name = resolve_name(function) or ""
    if not name.startswith("torch.Tensor."):
        return None
    # Torch has some methods under two names.
    for found in (name.removeprefix("torch.Tensor."), str(getattr(function, "__name__", ""))):
        if all(map(is_identifier, found.split("."))) and _is_same(_follow(torch.Tensor, found), function):
            return found
    return None


def applied_function(function: Any) -> type | None:
    """The autograd function whose `apply` was recorded."""
    found = getattr(function, "function", None)
    return found if isinstance(found, type) and issubclass(found, torch.autograd.Function) else None


def _torch_path(function: Any) -> str | None:
    """`torch.x`, `functional.x` or `torch.ops.x` for functions of torch."""
    if isinstance(function, type):
        return None
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        homes = [("torch.ops", torch.ops, str(function))]
    else:
        # Private functions have no name in `resolve_name`, but may be found under their own.
        name = resolve_name(function) or f"torch.{getattr(function, '__name__', '')}"
        # Functions that are defined in a module of torch are mostly offered by torch itself as well.
        homes = [("torch", torch, name.rpartition(".")[2]), ("torch", torch, name.removeprefix("torch."))]
        if name.startswith("torch.nn.functional."):
            homes = [("functional", functional, name.removeprefix("torch.nn.functional."))]
        elif not name.startswith("torch."):
            return None
    for word, home, path in homes:
        if all(map(is_identifier, path.split("."))) and _is_same(_follow(home, path), function):
            return f"{word}.{path}"
    return None


def _follow(thing: Any, path: str) -> Any:
    for word in path.split("."):
        thing = getattr(thing, word, None)
    return thing


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return one is not None
    # Every access to a method of an object makes a new bound method.
    return type(one) is type(other) and callable(one) and hasattr(one, "__self__") and bool(one == other)
