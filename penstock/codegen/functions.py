"""Functions: how a function that was called is written: by its name, as a method, an operator or an attribute."""

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import resolve_name

from penstock.codegen.imports import Imports, same, walked
from penstock.codegen.names import is_plain

_FUNCTIONAL = "torch.nn.functional."
_METHOD = "torch.Tensor."
_SCRIPTED = "__torch__."


def tensor_attribute(function: Any) -> str | None:
    """The name of a method of tensors, or of an attribute followed by `.__get__` or `.__set__`."""
    name = resolve_name(function) or ""
    if not name.startswith(_METHOD):
        return None
    # Torch knows some of its methods by two names.
    for found in (name.removeprefix(_METHOD), str(getattr(function, "__name__", ""))):
        if all(map(is_plain, found.split("."))) and same(walked(torch.Tensor, found), function):
            return found
    return None


def function_code(function: Any, imports: Imports) -> str | None:
    """The expression for a function or class; None if there is none that leads to it."""
    if (applied := applied_function(function)) is not None:
        owner = imports.code(applied)
        return f"{owner}.apply" if owner else None
    return _torchs(function) or _scripted(function, imports) or imports.code(function)


def applied_function(function: Any) -> type | None:
    """The autograd function whose `apply` is recorded."""
    found = getattr(function, "function", None)
    return found if isinstance(found, type) and issubclass(found, torch.autograd.Function) else None


def _torchs(function: Any) -> str | None:
    if isinstance(function, type):
        return None
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _at("torch.ops", torch.ops, str(function), function)
    # Torch has no name for what it keeps to itself, and still has it.
    name = resolve_name(function) or f"torch.{getattr(function, '__name__', '')}"
    if name.startswith(_FUNCTIONAL):
        return _at("functional", functional, name.removeprefix(_FUNCTIONAL), function)
    if not name.startswith("torch."):
        return None
    # Some functions that torch offers are at home in a module of it.
    short, full = name.rpartition(".")[2], name.removeprefix("torch.")
    return _at("torch", torch, short, function) or _at("torch", torch, full, function)


def _scripted(function: Any, imports: Imports) -> str | None:
    """A scripted function stands in its module in the place of the one that it was made from."""
    if not isinstance(function, torch.jit.ScriptFunction):
        return None
    module, _, name = str(function.qualified_name).removeprefix(_SCRIPTED).rpartition(".")
    return imports.found(module, name, function)


def _at(word: str, home: Any, path: str, function: Any) -> str | None:
    is_there = all(map(is_plain, path.split("."))) and same(walked(home, path), function)
    return f"{word}.{path}" if is_there else None
