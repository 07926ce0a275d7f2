"""Mentions: global variables and class attributes that the code of a class of the user's may go by."""

import argparse
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from penstock.capture.contents import PLAIN, content_of

_LIBRARIES = frozenset(
    (*sys.stdlib_module_names, "torch", "torchvision", "numpy", "transformers", "peft", "accelerate")
)
"""whose settings nobody changes between two batches"""
_CONFIGURATIONS = (types.SimpleNamespace, argparse.Namespace)
_CONTAINERS = (list, tuple, dict, set, frozenset)

Place = tuple[dict[str, Any], str]
_places: "WeakKeyDictionary[type, tuple[Place, ...]]" = WeakKeyDictionary()


def mentioned(kinds: Iterable[type]) -> dict[str, object]:
    """The contents of all that methods of some classes mention by a name of their file, and of class attributes."""
    own = dict.fromkeys(kind for each in kinds for kind in each.__mro__ if is_users(kind.__module__))
    found: dict[str, object] = {}
    for kind in own:
        for name, value in vars(kind).items():
            if not name.startswith("__") and _is_setting(value):
                found[f"{kind.__module__}.{kind.__qualname__}.{name}"] = content_of(value)
        for names, name in _places_of(kind):
            if name in names and _is_setting(names[name]):
                found[f"{names.get('__name__')}:{name}"] = content_of(names[name])
    return found


def is_users(module: object) -> bool:
    """Whether something from this module is the user's own."""
    return str(module).partition(".")[0] not in _LIBRARIES or module == "__main__"


def _is_setting(value: object) -> bool:
    if isinstance(value, (*PLAIN, *_CONTAINERS, *_CONFIGURATIONS)):
        return True
    if isinstance(value, type | types.ModuleType | nn.Module | Tensor) or callable(value):
        return False
    return is_users(type(value).__module__) and hasattr(value, "__dict__")


def _places_of(kind: type) -> tuple[Place, ...]:
    if kind not in _places:
        functions = [function for value in vars(kind).values() for function in _functions(value)]
        _places[kind] = tuple(_reached(functions))
    return _places[kind]


def _functions(value: Any) -> Iterator[Any]:
    for each in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
        if isinstance(each, types.FunctionType):
            yield each


def _reached(functions: list[Any]) -> Iterator[Place]:
    """All that functions of the user's mention, also those that they call by name."""
    seen: set[int] = set()
    while functions:
        function = functions.pop()
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        names = set(_names(function.__code__))
        for owner, name, value in _looked_up(function.__globals__, names):
            if isinstance(value, types.FunctionType) and is_users(value.__module__):
                functions.append(value)
            elif not isinstance(value, types.FunctionType | types.ModuleType | type):
                yield owner, name


def _looked_up(scope: dict[str, Any], names: set[str]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What names stand for in a file, and in files of the user's that it mentions."""
    for name in names & scope.keys():
        value = scope[name]
        yield scope, name, value
        if isinstance(value, types.ModuleType) and is_users(value.__name__):
            inside = vars(value)
            yield from ((inside, inner, inside[inner]) for inner in names & inside.keys())


def _names(code: Any) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
