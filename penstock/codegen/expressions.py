"""Python expressions for the arguments and calls of a recording, as source text.

Operands are written in parentheses; `formatting` parses every statement and removes those that are not needed. Names
of a model appear only as identifiers that were checked, or inside literals.
"""

import cmath
import enum
import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES

from penstock.capture import Recording, contiguous_entries
from penstock.codegen import support
from penstock.codegen.names import Imports, applied_function, is_identifier, is_index, tensor_attribute
from penstock.errors import CodeError
from penstock.ir import Container, ObjectRef, Ref, State, Tree, flatten_one_level, is_attributes_only

# fmt: off
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@", "pow": "**", "remainder": "%", "__add__": "+",
    "__sub__": "-", "__mul__": "*", "__truediv__": "/", "__matmul__": "@", "__pow__": "**", "__mod__": "%",
    "__floordiv__": "//", "__and__": "&", "__or__": "|", "__xor__": "^", "__lshift__": "<<", "__rshift__": ">>",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "__eq__": "==", "__ne__": "!=",
    "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=",
}
_INLINE_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)
# fmt: on
_REFLECTED = {"__rsub__": "-", "__rpow__": "**", "__rdiv__": "/", "__rtruediv__": "/", "__rfloordiv__": "//"}
_IN_PLACE = {"add_": "+=", "sub_": "-=", "mul_": "*=", "div_": "/="}
_UNARY = {"neg": "-", "__neg__": "-", "__invert__": "~"}
_CONVERSIONS = {"__bool__": "bool", "__int__": "int", "__float__": "float", "__complex__": "complex"}
_MAX_INLINE = 16
"""elements of a constant tensor that is written in the code"""
_STAGE_ATTRIBUTES = frozenset((*dir(support.Stage), *support.Stage.__annotations__, "training"))
"""attributes of a stage that are not parts of the model"""


def literal(value: bool | int | float | complex | str | bytes | tuple[Any, ...] | None) -> str:
    """The literal of a plain value; NaN and Inf have none and become calls of `float`."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, complex) and not cmath.isfinite(value):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    return repr(value)


def tuple_of(items: Iterable[str]) -> str:
    """A tuple of expressions."""
    return f"({''.join(f'{item}, ' for item in items)})"


def list_of(items: Iterable[str]) -> str:
    """A list of expressions."""
    return f"[{', '.join(items)}]"


def dict_of(keys: Iterable[str], items: Iterable[str]) -> str:
    """A dict of expressions."""
    return f"{{{', '.join(f'{key}: {item}' for key, item in zip(keys, items, strict=True))}}}"


def attribute(value: str, name: str) -> str:
    """`value.name`, or a call of `getattr` where the name is not an identifier."""
    # Inside a class, Python changes names that begin with two underscores.
    is_plain = is_identifier(name) and not name.startswith("__")
    return f"{value}.{name}" if is_plain else f"getattr({value}, {name!r})"


def access(container: str, kind: type, key: Any, key_code: str) -> str:
    """An item of a sequence or mapping, or a field of a dataclass."""
    is_item = issubclass(kind, Mapping | list | tuple)
    return f"{container}[{key_code}]" if is_item else attribute(container, str(key))


def expect(found: str, recorded: str, what: str) -> str:
    """A call of `expect` of the generated file: raises if a value differs from the recorded one."""
    return f"expect({found}, {recorded}, {what!r})"


class ConstantTensors:
    """Tensors that are not part of the model: in the code if they are small, else in a file beside it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[str, Tensor]] = {}

    def expression(self, tensor: Tensor) -> str:
        """The expression for a tensor."""
        is_usual = tensor.layout is torch.strided and tensor.dtype in _INLINE_DTYPES and tensor.device.type == "cpu"
        if is_usual and 0 < tensor.numel() <= _MAX_INLINE and bool(tensor.isfinite().all()):
            return f"torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype})"
        name, _ = self._kept.setdefault(id(tensor), (f"constant{len(self._kept)}", tensor))
        return f"CONSTANTS[{name!r}]"

    @property
    def content(self) -> bytes:
        """The content of the file beside the code; empty if it is not needed."""
        held = {name: contiguous_entries(tensor).cpu() for name, tensor in self._kept.values()}
        return save(held) if held else b""

    def statement(self, path: Path) -> str:
        """The statement that reads the file, which raises if its content is not the one that was written."""
        content = self.content
        return f"CONSTANTS = constants({path.name!r}, {hashlib.sha256(content).hexdigest()!r})" if content else ""


@dataclass(frozen=True)
class Expressions:
    """The expressions of one stage. `where` in its methods names the caller in errors."""

    recording: Recording
    variables: Mapping[str, str]
    """the Python name of every value"""
    blocks: Collection[str]
    """modules of the model that the stage holds whole"""
    imports: Imports
    tensors: ConstantTensors
    copied: Collection[str] = ()
    """values that are written as `x.clone()`"""

    def variable(self, value: str) -> str:
        """The variable of a value."""
        return f"{self.variables[value]}{'.clone()' if value in self.copied else ''}"

    def part(self, path: str) -> str:
        """A module, parameter or buffer of the stage."""
        words = path.split(".")
        inside = next((n for n in range(1, len(words)) if ".".join(words[:n]) in self.blocks), len(words))
        found = "self"
        for word in words[:inside]:
            is_attribute = is_identifier(word) and not word.startswith("__") and word not in _STAGE_ATTRIBUTES
            found += f".{word}" if is_attribute else f"[{word if is_index(word) else repr(word)}]"
        if inside == len(words):
            return found
        # Only parts of a stage have our `__getitem__`; a module of the model is entered by its own names.
        owner, name = words[inside:-1], words[-1]
        return attribute(f"{found}.get_submodule({'.'.join(owner)!r})" if owner else found, name)

    def argument(self, tree: Tree, where: str) -> str:
        """An argument of a recorded call."""
        if isinstance(tree, Ref):
            return self.variable(tree.value)
        if isinstance(tree, State):
            return self.part(tree.name)
        if isinstance(tree, ObjectRef):
            return self.constant(self.recording.live[tree.key], where)
        if isinstance(tree, Container):
            keys, items = ([self.argument(item, where) for item in side] for side in (tree.keys, tree.items))
            return self.container(self.recording.live[tree.kind], tree.keys, keys, items, where)
        return literal(tree)

    def container(self, kind: type, names: Sequence[Any], keys: list[str], items: list[str], where: str) -> str:
        """A container of any class, as `unflatten_one_level` makes it; `keys` is the code of its keys `names`."""
        if kind in (tuple, list):
            return tuple_of(items) if kind is tuple else list_of(items)
        if kind is slice:
            return f"slice({', '.join(items)})"
        if kind is dict:
            return dict_of(keys, items)
        name = self.imported(kind, where)
        if issubclass(kind, tuple | list):
            return f"{name}({', '.join(items) if hasattr(kind, '_fields') else list_of(items)})"
        if hasattr(kind, "__dataclass_fields__"):
            if not kind.__dataclass_params__.init:  # type: ignore[attr-defined]
                raise _not_writable(kind, where)
            return f"{name}({keyword_arguments(names, keys, items)})"
        if not issubclass(kind, Mapping):
            if not is_attributes_only(kind) or kind in SUPPORTED_NODES:
                raise _not_writable(kind, where)
            return f"with_attributes({name}, {dict_of(keys, items)})"
        # A defaultdict is written with no factory, as nothing adds keys to it any more.
        return f"{name}({'None, ' if issubclass(kind, defaultdict) else ''}{dict_of(keys, items)})"

    def constant(self, thing: Any, where: str) -> str:
        """An object that is the same in every forward."""
        if thing is None or thing is ... or type(thing) in (bool, int, float, str, complex, bytes):
            return "..." if thing is ... else literal(thing)
        if isinstance(thing, Tensor):
            return self.tensors.expression(thing)
        if isinstance(thing, torch.device):
            return "self.device" if str(thing) == self.recording.device else f"torch.device({str(thing)!r})"
        is_torch_constant = isinstance(thing, torch.dtype | torch.layout | torch.memory_format)
        if is_torch_constant and getattr(torch, str(thing).removeprefix("torch."), None) is thing:
            return str(thing)
        if type(thing) is range:
            return f"range({int(thing.start)}, {int(thing.stop)}, {int(thing.step)})"
        if isinstance(thing, enum.Enum) and thing.name in type(thing).__members__:
            return f"{self.imported(type(thing), where)}[{thing.name!r}]"
        if isinstance(thing, np.generic) and not isinstance(thing.item(), np.generic):
            return f"{self.imported(type(thing), where)}({self.constant(thing.item(), where)})"
        if type(thing) in (set, frozenset):
            items = [self.constant(item, where) for item in sorted(thing, key=repr)]
            return f"{type(thing).__name__}({list_of(items)})"
        if (parts := flatten_one_level(thing)) is not None:
            keys, items = ([self.constant(item, where) for item in side] for side in (parts.keys, parts.items))
            return self.container(parts.kind, parts.keys, keys, items, where)
        return self.imported(thing, where)

    def imported(self, thing: Any, where: str) -> str:
        """A class or function by its name."""
        path = self.imports.path(thing) if callable(thing) else None
        if path is None:
            raise _not_writable(thing, where)
        return path

    def module_call(self, module: str, args: Tree, kwargs: Tree, where: str) -> str:
        """A call of a module, or of anything else that has a name."""
        assert isinstance(args, Container)
        assert isinstance(kwargs, Container)
        keys, items = ([self.argument(item, where) for item in side] for side in (kwargs.keys, kwargs.items))
        positional = [self.argument(item, where) for item in args.items]
        return f"{module}({', '.join([*positional, *([keyword_arguments(kwargs.keys, keys, items)] if keys else [])])})"

    def changing_call(self, function: str, args: Tree, kwargs: Tree, where: str) -> str:
        """A call that changes its arguments: the generated code reads them after the call, as part of the result."""
        return f"with_arguments({function}, {self.argument(args, where)}, {self.argument(kwargs, where)})"

    def function_call(self, function: Any, args: Tree, kwargs: Tree, where: str) -> tuple[str, bool]:
        """A call of a function, with operators where a reader expects them; and whether it is a statement.

        A statement, such as `x[0] = y`, leaves its result in its first operand.
        """
        assert isinstance(args, Container)
        assert isinstance(kwargs, Container)
        name = tensor_attribute(function)
        if name is None or not args.items or not self._is_tensor(args.items[0]):
            return self.module_call(self.imported(function, where), args, kwargs, where), False
        if not kwargs.items and (special := self._operator(name, args.items, where)) is not None:
            return special
        rest = Container(args.kind, args.keys[1:], args.items[1:])
        method = f"{self.argument(args.items[0], where)}.{name}"
        return self.module_call(method, rest, kwargs, where), False

    def _operator(self, name: str, operands: tuple[Tree, ...], where: str) -> tuple[str, bool] | None:
        """An operator, index or attribute, and whether it is a statement; None for an ordinary method."""
        first, *rest = [self.argument(operand, where) for operand in operands]
        attribute_name, _, accessor = name.partition(".")
        if accessor:
            is_set = accessor == "__set__"
            return f"{first}.{attribute_name}{f' = {rest[0]}' if is_set else ''}", is_set
        if name in ("__getitem__", "__setitem__"):
            is_set = name == "__setitem__"
            return f"{first}[{self._index(operands[1], where)}]{f' = {rest[1]}' if is_set else ''}", is_set
        if not rest:
            if name in _CONVERSIONS:
                return f"{_CONVERSIONS[name]}({first})", False
            return (f"{_UNARY[name]}({first})", False) if name in _UNARY else None
        is_number = isinstance(operands[1], bool | int | float)
        if len(rest) > 1 or not (is_number or self._is_tensor(operands[1])):
            return None
        if name in _IN_PLACE and isinstance(operands[0], Ref):
            return f"{first} {_IN_PLACE[name]} {rest[0]}", True
        if name in _BINARY:
            return f"({first}) {_BINARY[name]} ({rest[0]})", False
        return (f"({rest[0]}) {_REFLECTED[name]} ({first})", False) if name in _REFLECTED and is_number else None

    def _index(self, tree: Tree, where: str) -> str:
        """An index; slices in it are written with colons."""

        def entry(tree: Tree) -> str:
            if isinstance(tree, Container) and self.recording.live[tree.kind] is slice:
                start, stop, step = ("" if item is None else self.argument(item, where) for item in tree.items)
                return f"{start}:{stop}:{step}"
            return self.argument(tree, where)

        if isinstance(tree, Container) and self.recording.live[tree.kind] is tuple and tree.items:
            return "".join(f"{entry(item)}, " for item in tree.items)
        return entry(tree)

    def _is_tensor(self, tree: Tree) -> bool:
        is_constant = isinstance(tree, ObjectRef) and isinstance(self.recording.live[tree.key], Tensor)
        return is_constant or isinstance(tree, Ref | State)


def keyword_arguments(names: Sequence[Any], keys: Iterable[str], items: Iterable[str]) -> str:
    """Arguments by keyword; as `**{...}` if a name is not an identifier."""
    if not all(isinstance(name, str) and is_identifier(name) for name in names):
        return f"**{dict_of(keys, items)}"
    return ", ".join(f"{name}={item}" for name, item in zip(names, items, strict=True))


def _not_writable(thing: Any, where: str) -> CodeError:
    thing = applied_function(thing) or thing
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return CodeError(
        "the model uses an object that cannot be written as Python code",
        object=f"{named.__module__}.{named.__qualname__}",
        where=where or "the model",
        hint="define it at the top of a module that can be imported, or keep the module around it whole (basic_blocks)",
    )
