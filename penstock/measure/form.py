"""Form: what a module is made of, as text that is the same in every process as long as it does the same work."""

import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_TORCHS = frozenset(vars(nn.Module()))
"""what every module has"""
_PLACES = re.compile(r"_?((layer|block|stage|module)_?(idx|index|id|number|num|i)|idx|index)")
"""names under which modules keep which of many they are; no two would be alike otherwise"""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH, _LONGEST = 5, 256


class Forms:
    """Forms of modules; what many of them share, such as a configuration, is looked at once."""

    def __init__(self, with_places: bool) -> None:
        """`with_places` tells modules apart that differ in nothing but which of many they are."""
        self._with_places = with_places
        self._known: dict[tuple[int, int], tuple[Any, str]] = {}

    def of(self, module: nn.Module) -> str:
        """All parts of a module under the names that they have in it, with their state and settings."""
        return _digest(line for path, part in module.named_modules() for line in self._lines(path, part))

    def _lines(self, path: str, part: nn.Module) -> Iterator[str]:
        yield f"{path} {kind_name(type(part))} {part.training}"
        for kind in (part._parameters, part._buffers):
            yield from (f"{name} {tensor_form(tensor)}" for name, tensor in kind.items())
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        yield " ".join(self.value(hook) for kind in hooks for hook in kind.values())
        for name, value in vars(part).items():
            is_place = type(value) is int and _PLACES.fullmatch(name) and not self._with_places
            if name not in _TORCHS and not is_place:
                yield f"{name}={self.value(value)}"

    def value(self, value: Any, depth: int = _DEPTH) -> str:
        """A setting by its content, down to some depth."""
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, Tensor):
            return tensor_form(value)
        if isinstance(value, np.ndarray):
            return f"array {value.shape} {value.dtype}"
        # Who keeps the value keeps its identity from being used again.
        kept = self._known.get((id(value), depth))
        if kept is None:
            kept = self._known[id(value), depth] = (value, self._composed(value, depth))
        return kept[1]

    def _composed(self, value: Any, depth: int) -> str:
        name = kind_name(type(value))
        if isinstance(value, type):
            return kind_name(value)
        if not depth or isinstance(value, nn.Module):
            return name
        if isinstance(value, list | tuple | set | frozenset) and len(value) <= _LONGEST:
            items = [self.value(item, depth - 1) for item in value]
            return f"{name}({', '.join(sorted(items) if isinstance(value, set | frozenset) else items)})"
        if isinstance(value, dict) and len(value) <= _LONGEST:
            return f"{name}({', '.join(f'{key}: {self.value(item, depth - 1)}' for key, item in value.items())})"
        if isinstance(value, functools.partial):
            return f"{name}({self.value([value.func, value.args, value.keywords], depth - 1)})"
        if inspect.ismethod(value):
            return f"{name}({self.value(value.__func__, depth - 1)})"
        if inspect.isfunction(value):
            return f"{name}({value.__qualname__} {code_digest(value.__code__)} {self._around(value, depth - 1)})"
        if callable(value) and hasattr(value, "__qualname__"):
            return f"{name}({value.__qualname__})"
        held = getattr(value, "__dict__", None)
        return f"{name}({self.value(held, depth - 1) if isinstance(held, dict) else ''})"

    def _around(self, function: Any, depth: int) -> str:
        """What a function holds besides its code."""
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        return self.value([*cells, *(function.__defaults__ or ())], depth)


def tensor_form(tensor: Tensor | None) -> str:
    """What is known of a tensor without its numbers."""
    if tensor is None:
        return "None"
    return f"{type(tensor).__name__} {tuple(tensor.shape)} {tensor.dtype} {tensor.device} {tensor.requires_grad}"


def kind_name(kind: type) -> str:
    """The class by its full name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def sources(model: nn.Module) -> str:
    """A digest of the code of all classes of a model but torch's own, which its version stands for."""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__ if _is_users(kind)}
    return _digest(sorted({_source(kind) for kind in kinds}))


@functools.cache
def _source(kind: type) -> str:
    """The code of a class, and its file, as functions beside it count as well."""
    functions = [thing for thing in vars(kind).values() if inspect.isfunction(thing)]
    own = _digest(code_digest(function.__code__) for function in functions)
    return f"{kind_name(kind)} {own} {_file_digest(getattr(sys.modules.get(kind.__module__), '__file__', None) or '')}"


@functools.cache
def _file_digest(path: str) -> str:
    """Of the file as it is when it is first looked at; empty where there is none, as in a notebook."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def code_digest(code: CodeType) -> str:
    """A digest of compiled code."""
    return _digest((code.co_code.hex(), *map(_constant, code.co_consts), *code.co_names))


def _constant(thing: object) -> str:
    if isinstance(thing, CodeType):
        return code_digest(thing)
    # The order of a set is another in every process.
    return repr(sorted(map(repr, thing)) if isinstance(thing, frozenset) else thing)


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "builtins")


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _digest(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
