"""The structures of results as text, which a replay compares with those that were recorded."""

import enum
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from penstock.capture.tensors import TORCH_CONSTANTS
from penstock.ir import TENSOR, Parts, Ref, flatten_one_level, leaves

_REPR_TYPES = (*TORCH_CONSTANTS, np.generic, np.dtype, enum.Enum)
_VALUE_TYPES = (bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis))
_FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType)
_TYPES_WITH_NAN = (float, complex, list, tuple)


def structure_of(value: object) -> str:
    """Classes, keys and plain values of a structure in one line; every tensor is "*", an object only its class.

    A record holds for a batch only if every call returns the structure that it returned when it was recorded.
    """
    if isinstance(value, Tensor):
        return TENSOR
    if parts := flatten_one_level(value):
        # The keys of a list are its indices.
        kind = parts.kind.__qualname__
        if issubclass(parts.kind, list | tuple):
            return f"{kind}({', '.join(map(structure_of, parts.items))})"
        pairs = zip(map(structure_of, parts.keys), map(structure_of, parts.items), strict=True)
        return f"{kind}({', '.join(f'{key}: {item}' for key, item in pairs)})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__qualname__}({', '.join(sorted(map(structure_of, value)))})"
    if _is_shown_by_structure(value):
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        return repr(value)
    return f"object {type(value).__qualname__}"


def opaque_leaves(structure: object, is_known: Callable[[Any], bool]) -> list[object]:
    """The objects that the text of a structure shows only by class, except those that `is_known` accepts."""
    return [leaf for leaf in leaves(structure) if not _is_shown_by_structure(leaf) and not is_known(leaf)]


def structure_with_names(structure: object, name: Callable[[Tensor, str], str], path: str = "") -> Any:
    """The structure with containers as their Parts and tensors as references to their names.

    `name` is called with each tensor and its path: `path` and the keys that lead to the tensor, with dots between.
    """
    if isinstance(structure, Tensor):
        return Ref(name(structure, path))
    parts = flatten_one_level(structure)
    if parts is None:
        return structure
    pairs = zip(parts.keys, parts.items, strict=True)
    items = (structure_with_names(item, name, f"{path}.{key}") for key, item in pairs)
    return Parts(parts.kind, parts.keys, tuple(items))


def _is_shown_by_structure(leaf: object) -> bool:
    """Whether two values with equal text in `structure_of` are equal."""
    if isinstance(leaf, Tensor) or type(leaf) in _VALUE_TYPES or isinstance(leaf, (*_REPR_TYPES, type)):
        return True
    if isinstance(leaf, set | frozenset):
        return all(map(_is_shown_by_structure, leaf))
    if not isinstance(leaf, _FUNCTION_TYPES) or "<locals>" in leaf.__qualname__:
        # A function defined inside another one may depend on the variables around it.
        return False
    owner = getattr(leaf, "__self__", None)
    return owner is None or isinstance(owner, types.ModuleType | type)


@dataclass(frozen=True, eq=False)
class Expected:
    """The value that a guard expects to read."""

    value: Any

    def agrees(self, value: Any) -> bool:
        """Whether the same value was read again."""
        if isinstance(self.value, np.ndarray):
            return np.array_equal(value, self.value, equal_nan=True)
        if type(value) is not type(self.value):
            return False
        # By repr too, as NaN is not equal to itself, also inside a list.
        return bool(value == self.value) or (isinstance(value, _TYPES_WITH_NAN) and repr(value) == repr(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expected) and self.agrees(other.value)

    __hash__ = None
