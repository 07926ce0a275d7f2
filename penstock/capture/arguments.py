"""Encodes the arguments of calls as plain data, and builds arguments from it for a replay.

Arguments become trees (`penstock.ir.Tree`): containers, plain values, and references to named tensors. Functions,
classes and constants that plain data cannot hold go into the *live table* and are referred to by key.
"""

import enum
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import resolve_name

from penstock.capture.functions import WholeFunction
from penstock.capture.objects import holds_tensors, user_line
from penstock.capture.random_draws import ArrayOf, DrawnArray, DrawnNumber, NumberOf, PythonDraw
from penstock.capture.tensors import TORCH_CONSTANTS, device_of, same_content
from penstock.capture.transforms import TransformedCall
from penstock.errors import CaptureError, PartitionError
from penstock.ir import Container, ObjectRef, Ref, State, Tree, flatten_one_level, unflatten_one_level

Values = dict[str, Any]
"""tensors by name"""
Getter = Callable[[Values], Any]
Naming = Callable[[Tensor], "Ref | State | None"]
_NAN = float("nan")


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
        """tensors that are not part of the model, each with its content before the forward"""

    def write(self, value: object, where: str) -> Tree:
        """The tree of a Python structure; raises a CaptureError that names `where` if it cannot be replayed."""
        # By exact type: a subclass of int or str may be more than a number or a text.
        if value is None or type(value) in (bool, int, float, str):
            # Records are compared with ==, and NaN is equal to nothing: use one object, which tuples compare by `is`.
            return _NAN if value != value else value
        if isinstance(value, Tensor):
            return self._write_tensor(value, where)
        if isinstance(value, DrawnNumber | DrawnArray):
            kind = NumberOf if isinstance(value, DrawnNumber) else ArrayOf
            return Container(self.key(kind), (0,), (self._write_tensor(value.tensor, where),))
        if parts := flatten_one_level(value):
            keys = tuple(self.write(key, where) for key in parts.keys)
            return Container(self.key(parts.kind), keys, tuple(self.write(item, where) for item in parts.items))
        if isinstance(value, nn.Module):
            raise CaptureError(
                "a module is passed to a function or to another module, which hides whose parameters are used",
                module=type(value).__name__,
                where=where,
                hint="keep the module that contains both as one block (basic_blocks)",
            )
        if holds_tensors(value):
            # An example is a closure: a stage could not send it to another rank, nor detect writes into it.
            raise CaptureError(
                "an object that holds tensors is passed from one block of the model to another",
                object=type(value).__name__,
                where=where,
                hint="pass tensors in lists, dicts, dataclasses or objects with plain attributes, or keep the module "
                "around both whole (basic_blocks)",
            )
        return ObjectRef(self.key(value))

    def _write_tensor(self, tensor: Tensor, where: str) -> Tree:
        reference = self._naming(tensor)
        if reference is not None:
            return reference
        if is_functorch_wrapped_tensor(tensor):
            raise CaptureError(
                "a function is transformed between blocks (torch.vmap, torch.func), which hides its arguments",
                where=where,
                hint="keep the module that does so whole (basic_blocks)",
            )
        if tensor.requires_grad:
            raise unknown_origin(tensor, where, user_line())
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

    def key(self, value: Any) -> str:
        """Put an object into the live table, if it is not there, and return its key."""
        if isinstance(value, torch.Generator):
            name = "generator"
        elif isinstance(value, TORCH_CONSTANTS):
            name = f"{type(value).__name__}:{value}"
        elif isinstance(value, enum.Enum):
            name = f"{type(value).__name__}.{value.name}"
        else:
            name = _function_name(value) if callable(value) else f"constant:{type(value).__name__}"
        if name in self.live and not _are_interchangeable(self.live[name], value):
            numbered = (f"{name}@{number}" for number in range(2, 1 << 30))
            name = next(key for key in numbered if _are_interchangeable(self.live.get(key, value), value))
        self.live.setdefault(name, value)
        return name


class ArgumentReader:
    """Turns the trees of a recording back into Python structures."""

    def __init__(
        self, live: Mapping[str, Any], device: str, modules: nn.Module, whole: nn.Module | None = None
    ) -> None:
        """`live` and `device` are those of the recording. State that `modules` lacks is looked up in `whole`."""
        self._live, self._device = live, device
        self._modules, self._whole = modules, whole or modules

    def getter(self, tree: Tree) -> Getter:
        """A function that builds the structure of a tree from values by name."""
        if isinstance(tree, Ref):
            return itemgetter(tree.value)
        if isinstance(tree, State):
            path, _, attribute = tree.name.rpartition(".")
            owner = self._whole.get_submodule(path)
            with suppress(AttributeError):
                own = self._modules.get_submodule(path)
                getattr(own, attribute)
                owner = own
            # Looked up in every call: the attribute may be assigned later, a plain tensor even only in the forward.
            return lambda values: getattr(owner, attribute)
        if isinstance(tree, ObjectRef):
            value = self._live[tree.key]
            if isinstance(value, torch.device) and str(value) == self._device:
                # The model was recorded on one device and runs on another.
                modules = self._modules
                return lambda values: device_of(modules, value)
            return lambda values: value
        if not isinstance(tree, Container):
            return lambda values: tree
        kind = self._live[tree.kind]
        items = [self.getter(item) for item in tree.items]
        keys = [self.getter(key)({}) for key in tree.keys]
        if not tree.items and kind in (tuple, list, dict):
            # Most calls have no keyword arguments. A new container each time, as the callee may change it.
            return lambda values: kind()
        if kind is tuple:
            if all(isinstance(item, Ref) for item in tree.items):
                names = [item.value for item in tree.items]
                # With one name, itemgetter does not return a tuple.
                return itemgetter(*names) if len(names) > 1 else lambda values: (values[names[0]],)
            return lambda values: tuple([item(values) for item in items])
        if kind is dict:
            return lambda values: {key: item(values) for key, item in zip(keys, items, strict=True)}
        return lambda values: unflatten_one_level(kind, keys, [item(values) for item in items])

    def module(self, path: str) -> nn.Module:
        """The module of this name; from the unsplit model if it is not a block of the plan, as a dropout with p = 0."""
        with suppress(AttributeError):
            module = self._modules.get_submodule(path)
            # A stage has bare modules in place of those that it has only parts of.
            if type(module) is not nn.Module:
                return module
        module = self._whole.get_submodule(path)
        own = {id(tensor) for tensor in (*self._modules.parameters(), *self._modules.buffers())}
        state = (*module.named_parameters(), *module.named_buffers())
        if name := next((name for name, tensor in state if id(tensor) not in own), None):
            raise PartitionError(
                "a stage must have all parameters of a block that it runs",
                block=path,
                missing=name,
                hint="a new plan and Pipeline, or capture and split again, if the model has new modules",
            )
        return module


def unknown_origin(tensor: Tensor, where: str, line: str = "") -> CaptureError:
    """The error for a tensor that a replay could not find."""
    hint = "make it a buffer (register_buffer), or keep the module whole (basic_blocks)"
    if tensor.grad_fn is not None:
        hint = "clear tensors that the model keeps from an earlier forward, or keep the module whole (basic_blocks)"
    return CaptureError(
        "a tensor of unknown origin is used",
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        where=where,
        **({"line": line} if line else {}),
        hint=hint,
    )


def short_name(function: Any) -> str:
    """The last word of a function's name, as in the names of nodes."""
    words = [word for word in re.split(r"[^A-Za-z0-9_]+", _function_name(function)) if word not in ("__get__", "apply")]
    return words[-1].strip("_") or "call"


def _function_name(function: Any) -> str:
    if isinstance(function, TransformedCall):
        return f"torch.func.{function.transform}"
    function = function.function if isinstance(function, PythonDraw | WholeFunction) else function
    if isinstance(function, FunctionApply):
        return f"{function.function.__module__}.{function.function.__qualname__}.apply"
    name = _resolve_name()(function) or getattr(function, "__qualname__", None) or type(function).__name__
    module = getattr(function, "__module__", None)
    return name if name.startswith("torch.") or not module else f"{module}.{name}"


@cache
def _resolve_name() -> Callable[[Any], str | None]:
    # torch.overrides.resolve_name is decorated to silence warnings on every call, which only its first call emits.
    resolve_name(torch.relu)
    return inspect.unwrap(resolve_name)


def _are_interchangeable(first: Any, second: Any) -> bool:
    """Whether one object can stand for both in a replay: the same tensor, or equal values of one type."""
    if first is second or isinstance(first, Tensor) or isinstance(second, Tensor):
        return first is second
    try:
        # The types too: 1, 1.0 and True are equal.
        return bool(type(first) is type(second) and first == second)
    except (ValueError, RuntimeError, TypeError):
        return False
