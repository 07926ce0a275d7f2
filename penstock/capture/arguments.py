"""Encodes the arguments and results of calls as plain data.

Arguments become trees (`penstock.ir.Tree`): containers, plain values, and references to named tensors. Functions,
classes and constants that plain data cannot hold go into the *live table* and are referred to by key. Results are
compared by their structure, one line of text.
"""

import enum
import inspect
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import resolve_name

from penstock.capture.objects import holds_tensors
from penstock.capture.tensor_table import same_content
from penstock.errors import CaptureError
from penstock.ir import Container, ObjectRef, Parts, Ref, State, Tree, leaves, take_apart

Naming = Callable[[Tensor], "Ref | State | None"]
_NAN = float("nan")
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator)

TENSOR = "*"
"""the structure of a single tensor"""
_REPR_TYPES = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic, np.dtype, enum.Enum)
_VALUE_TYPES = (bool, int, float, complex, str, bytes, range, type(None), type(Ellipsis))
_FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType)
_TYPES_WITH_NAN = (float, complex, list, tuple)


@dataclass(frozen=True)
class FunctionApply:
    """The `apply` of an autograd function, looked up when it is called."""

    function: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


class ArgumentWriter:
    """Writes arguments as trees; `live` is the table of the objects that the trees refer to by key."""

    def __init__(self, naming: Naming) -> None:
        """`naming` returns the reference to a tensor, or None if the tensor has no name."""
        self._naming = naming
        self.live: dict[str, Any] = {}
        self._constants: dict[str, tuple[Tensor, Tensor]] = {}

    def write(self, thing: object, where: str) -> Tree:
        """The tree of a Python structure; raises a CaptureError that names `where` if it cannot be replayed."""
        # By exact type: a subclass of int or str may be more than a number or a text.
        if thing is None or type(thing) in (bool, int, float, str):
            # Records are compared with ==, and NaN is equal to nothing: use one object, which tuples compare by `is`.
            return _NAN if thing != thing else thing  # type: ignore[return-value]
        if isinstance(thing, Tensor):
            return self._write_tensor(thing, where)
        if parts := take_apart(thing):
            keys = tuple(self.write(key, where) for key in parts.keys)
            return Container(self.key(parts.kind), keys, tuple(self.write(item, where) for item in parts.items))
        if isinstance(thing, nn.Module):
            raise CaptureError(
                "a module is passed to a function or to another module, which hides whose parameters are used",
                module=type(thing).__name__,
                where=where,
                hint="keep the module that contains both as one block (basic_blocks)",
            )
        if holds_tensors(thing):
            # Such as a key-value cache: a stage could not send it to another rank, nor see who writes into it.
            raise CaptureError(
                "an object that holds tensors is passed from one block of the model to another",
                object=type(thing).__name__,
                where=where,
                hint="pass tensors in lists, tuples, dicts or dataclasses, or keep the module around both whole "
                "(basic_blocks); for Hugging Face models use_cache=False",
            )
        return ObjectRef(self.key(thing))

    def _write_tensor(self, tensor: Tensor, where: str) -> Tree:
        found = self._naming(tensor)
        if found is not None:
            return found
        if is_functorch_wrapped_tensor(tensor):
            raise CaptureError(
                "a function is transformed between blocks (torch.vmap, torch.func), which hides its arguments",
                where=where,
                hint="keep the module that does so whole (basic_blocks)",
            )
        if tensor.requires_grad:
            raise unknown_origin(tensor, where)
        # A tensor that is not part of the model, such as a global variable. Every forward must use the same tensor.
        key = self.key(tensor)
        if key not in self._constants:
            self._constants[key] = tensor, tensor.detach().clone()
        return ObjectRef(key)

    def restore_constants(self) -> list[Tensor]:
        """Undo writes into tensors that are not part of the model; returns the tensors that were written."""
        changed = [
            (tensor, content)
            for tensor, content in self._constants.values()
            if not tensor.is_meta and not same_content(tensor, content)
        ]
        for tensor, content in changed:
            tensor.data.copy_(content)
        return [tensor for tensor, _ in changed]

    def key(self, thing: Any) -> str:
        """Put an object into the live table, if it is not there, and return its key."""
        name = _live_name(thing)
        if name in self.live and not _may_share_key(self.live[name], thing):
            numbered = (f"{name}@{number}" for number in range(2, 1 << 30))
            name = next(key for key in numbered if _may_share_key(self.live.get(key, thing), thing))
        self.live.setdefault(name, thing)
        return name


def unknown_origin(tensor: Tensor, where: str) -> CaptureError:
    """The error for a tensor that a replay could not find."""
    return CaptureError(
        "a tensor of unknown origin is used",
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        where=where,
        hint="make it a buffer (register_buffer), or keep the module whole (basic_blocks)",
    )


def short_name(function: Any) -> str:
    """The last word of a function's name, as in the names of nodes."""
    words = [word for word in re.split(r"[^A-Za-z0-9_]+", _function_name(function)) if word not in ("__get__", "apply")]
    return words[-1].strip("_") or "call"


def _live_name(thing: Any) -> str:
    if isinstance(thing, _TORCH_CONSTANTS):
        return f"{type(thing).__name__}:{thing}" if not isinstance(thing, torch.Generator) else "generator"
    if isinstance(thing, enum.Enum):
        return f"{type(thing).__name__}.{thing.name}"
    return _function_name(thing) if callable(thing) else f"constant:{type(thing).__name__}"


def _function_name(function: Any) -> str:
    if isinstance(function, FunctionApply):
        return f"{function.function.__module__}.{function.function.__qualname__}.apply"
    name = _resolve_name()(function) or getattr(function, "__qualname__", None) or type(function).__name__
    module = getattr(function, "__module__", None)
    return name if name.startswith("torch.") or not module else f"{module}.{name}"


@cache
def _resolve_name() -> Callable[[Any], str | None]:
    # torch.overrides.resolve_name is decorated to silence warnings on every call, which only its first call emits.
    resolve_name(torch.relu)
    unwrapped: Callable[[Any], str | None] = inspect.unwrap(resolve_name)
    return unwrapped


def _may_share_key(one: Any, other: Any) -> bool:
    if one is other or isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    try:
        # The types too: 1, 1.0 and True are equal.
        return bool(type(one) is type(other) and one == other)
    except (ValueError, RuntimeError, TypeError):
        return False


# Structures of results


def structure_of(thing: object) -> str:
    """Classes, keys and plain values of a structure in one line; every tensor is "*", an object only its class.

    A record holds for a batch only if every call returns the structure that it returned when it was recorded.
    """
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
    if _is_shown_by_structure(thing):
        if isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType):
            return f"{thing.__module__}.{thing.__qualname__}"
        return repr(thing)
    return f"object {type(thing).__qualname__}"


def opaque_leaves(thing: object, is_known: Callable[[Any], bool]) -> list[object]:
    """The objects that the text of a structure shows only by class, except those that `is_known` accepts."""
    return [leaf for leaf in leaves(thing) if not _is_shown_by_structure(leaf) and not is_known(leaf)]


def structure_with_names(thing: object, name: Callable[[Tensor], str]) -> Any:
    """The structure with containers as their Parts and tensors as references to their names."""
    if isinstance(thing, Tensor):
        return Ref(name(thing))
    parts = take_apart(thing)
    if parts is None:
        return thing
    return Parts(parts.kind, parts.keys, tuple(structure_with_names(item, name) for item in parts.items))


def _is_shown_by_structure(leaf: object) -> bool:
    """Whether equal text means an equal value."""
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

    def agrees(self, found: Any) -> bool:
        """Whether the same value was read again."""
        if isinstance(self.value, np.ndarray):
            return np.array_equal(found, self.value, equal_nan=True)
        if type(found) is not type(self.value):
            return False
        # By repr too, as NaN is not equal to itself, also inside a list.
        return bool(found == self.value) or (isinstance(found, _TYPES_WITH_NAN) and repr(found) == repr(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expected) and self.agrees(other.value)

    __hash__ = None  # type: ignore[assignment]
