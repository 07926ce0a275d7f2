"""Structure: what a call returned, told in one line, so that a replay can see whether it is the same again."""

import enum
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.ir import Parts, Ref, leaves, take_apart

TENSOR = "*"
"""the line of a single tensor"""
_WORDS = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic, np.dtype, enum.Enum)
_VALUES = (bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis))


def structure_of(thing: object) -> str:
    """Classes, keys and plain values of a structure; tensors are all alike, and so are objects of one class."""
    if isinstance(thing, Tensor):
        return TENSOR
    if parts := take_apart(thing):
        kind = parts.kind.__qualname__
        if issubclass(parts.kind, list | tuple):
            return f"{kind}({', '.join(map(structure_of, parts.items))})"
        pairs = zip(map(structure_of, parts.keys), map(structure_of, parts.items), strict=True)
        return f"{kind}({', '.join(f'{key}: {item}' for key, item in pairs)})"
    if isinstance(thing, set | frozenset):
        return f"{type(thing).__qualname__}({', '.join(sorted(map(structure_of, thing)))})"
    if is_telling(thing):
        return (
            _name_of(thing) if isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType) else repr(thing)
        )
    return f"object {type(thing).__qualname__}"


def answer_of(thing: object, label: Callable[[Tensor], str]) -> Any:
    """The same structure with containers as their Parts and tensors as Refs of their labels."""
    if isinstance(thing, Tensor):
        return Ref(label(thing))
    parts = take_apart(thing)
    if parts is None:
        return thing
    return Parts(parts.kind, parts.keys, tuple(answer_of(item, label) for item in parts.items))


def is_telling(leaf: object) -> bool:
    """Whether all that there is to a leaf shows in its line, so that the same line means the same thing."""
    if isinstance(leaf, Tensor) or type(leaf) in _VALUES or isinstance(leaf, (*_WORDS, type)):
        return True
    if isinstance(leaf, set | frozenset):
        return all(map(is_telling, leaf))
    # A function at the top of its module is the same each time; one made inside another may know what it was made from.
    if not isinstance(leaf, types.FunctionType | types.BuiltinFunctionType):
        return False
    return "<locals>" not in leaf.__qualname__ and _owner_is_module(leaf)


def opaque_leaves(thing: object, is_known: Callable[[Any], bool]) -> list[object]:
    """The objects in a structure of which its line tells only the class, and that were not known before."""
    return [leaf for leaf in leaves(thing) if not is_telling(leaf) and not is_known(leaf)]


def _owner_is_module(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return owner is None or isinstance(owner, types.ModuleType | type)


def _name_of(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
