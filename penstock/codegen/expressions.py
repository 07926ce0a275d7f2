"""Python expressions for the arguments and calls of a recording, as source text.

Operands are written in parentheses; `formatting` parses every statement and removes those that are not needed. Names
of a model appear only as identifiers that were checked, or inside literals.
"""

import cmath
import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES

from penstock.capture import Recording
from penstock.codegen import support
from penstock.codegen.names import Names, applied_function, is_identifier, is_index, tensor_attribute
from penstock.errors import CodeError
from penstock.ir import Container, ObjectRef, Parts, Ref, State, Tree, flatten_one_level

# fmt: off
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "floordiv": "//", "remainder": "%", "mod": "%",
    "matmul": "@", "pow": "**", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}
"""by the name of a method without underscores"""
_FORMS = {
    "neg": "-({0})", "__neg__": "-({0})", "__invert__": "~({0})",
    "__bool__": "bool({0})", "__int__": "int({0})", "__float__": "float({0})", "__complex__": "complex({0})",
    **{name: f"({{0}}) {sign} ({{1}})" for word, sign in _OPERATORS.items() for name in (word, f"__{word}__")},
}
"""by the name of a method: the expression for a call of it"""
_REFLECTED = {f"__r{word}__": f"({{1}}) {sign} ({{0}})" for word, sign in _OPERATORS.items()}
"""the same for methods that Python calls if a number is on the left"""
_IN_PLACE = {"add_": "{0} += {1}", "sub_": "{0} -= {1}", "mul_": "{0} *= {1}", "div_": "{0} /= {1}"}
"""the same for methods that write their tensor, which must be in a variable"""
_INLINE_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)
# fmt: on
_MAX_INLINE = 16
"""most elements of a constant tensor that is written into the code; larger ones go to the file beside it"""
_STAGE_ATTRIBUTES = frozenset((*dir(support.Stage), *support.Stage.__annotations__, "training"))
"""attributes of a stage that are not parts of the model"""


def literal(value: bool | int | float | complex | str | bytes | tuple[Any, ...] | None) -> str:
    """The literal of a plain value; NaN and Inf have none and become calls of `float` or `complex`."""
    if isinstance(value, float | complex) and not cmath.isfinite(value):
        return f"{type(value).__name__}({str(value)!r})"
    return repr(value)


def tuple_of(items: Iterable[str]) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"


def dict_of(keys: Iterable[str], items: Iterable[str]) -> str:
    return f"{{{', '.join(f'{key}: {item}' for key, item in zip(keys, items, strict=True))}}}"


@dataclass(frozen=True)
class Expressions:
    """The expressions of a generated file. `where` in its methods names the caller in errors."""

    recording: Recording
    variables: Mapping[str, str]
    """the Python name of every value"""
    names: Names
    blocks: Collection[str]
    """modules of the model that its stages hold whole"""
    constants: dict[int, Tensor] = field(default_factory=dict)
    """large tensors that are not part of the model, by `id`: they are in a file beside the code"""
    device: str = "self.device"
    """the expression for the device of the model"""

    def part(self, path: str) -> str:
        """A module, parameter or buffer of the stage."""
        words, text = path.split("."), "self"
        for place, word in enumerate(words):
            is_in_block = any(".".join(words[:n]) in self.blocks for n in range(1, place + 1))
            # Inside a class, Python changes names that begin with two underscores.
            if is_identifier(word) and not word.startswith("__") and (place or word not in _STAGE_ATTRIBUTES):
                text += f".{word}"
            elif is_index(word) and not is_in_block:
                text += f"[{word}]"
            else:
                return f"self[{path!r}]"
        return text

    def access(self, container: str, kind: type, key: Any, where: str) -> str:
        """An item of a sequence or mapping, or a field of a dataclass."""
        if issubclass(kind, Mapping | list | tuple):
            return f"{container}[{self.expression(key, where)}]"
        if kind in SUPPORTED_NODES:
            raise not_writable(kind, where)
        # Inside a class, Python changes names that begin with two underscores.
        is_plain = is_identifier(key) and not key.startswith("__")
        return f"{container}.{key}" if is_plain else f"getattr({container}, {key!r})"

    def expression(self, thing: Any, where: str) -> str:
        """An argument of a recorded call, or an object that is the same in every forward."""
        if isinstance(thing, Ref):
            return self.variables[thing.value]
        if isinstance(thing, State):
            return self.part(thing.name)
        if isinstance(thing, ObjectRef):
            return self.expression(self.recording.live[thing.key], where)
        if isinstance(thing, Container):
            return self._container(Parts(self.recording.live[thing.kind], thing.keys, thing.items), where)
        if thing is None or thing is ... or type(thing) in (bool, int, float, str, complex, bytes, range):
            return "..." if thing is ... else literal(thing)
        if isinstance(thing, Tensor):
            return self._tensor(thing)
        if isinstance(thing, torch.device):
            return self.device if str(thing) == self.recording.device else f"torch.device({str(thing)!r})"
        if isinstance(thing, torch.dtype | torch.layout | torch.memory_format):
            return str(thing)
        if isinstance(thing, enum.Enum) and thing.name in type(thing).__members__:
            return f"{self.imported(type(thing), where)}[{thing.name!r}]"
        if isinstance(thing, np.generic) and not isinstance(thing.item(), np.generic):
            return f"{self.imported(type(thing), where)}({self.expression(thing.item(), where)})"
        if type(thing) in (set, frozenset):
            return f"{type(thing).__name__}({self.expression(sorted(thing, key=repr), where)})"
        parts = flatten_one_level(thing)
        return self._container(parts, where) if parts is not None else self.imported(thing, where)

    def imported(self, thing: Any, where: str) -> str:
        """A class or function by its name."""
        path = self.names.imported(thing) if callable(thing) else None
        if path is None:
            raise not_writable(thing, where)
        return path

    def _tensor(self, tensor: Tensor) -> str:
        """A tensor that is not part of the model: in the code if it is small, else in the file beside it."""
        is_usual = tensor.layout is torch.strided and tensor.dtype in _INLINE_DTYPES and tensor.device.type == "cpu"
        if is_usual and 0 < tensor.numel() <= _MAX_INLINE and bool(tensor.isfinite().all()):
            return f"torch.tensor({tensor.tolist()!r}, dtype={tensor.dtype})"
        self.constants.setdefault(id(tensor), tensor)
        return f"CONSTANTS['constant{list(self.constants).index(id(tensor))}']"

    def _container(self, parts: Parts, where: str) -> str:
        """A container of any class, as `unflatten_one_level` makes it."""
        kind, (keys, items) = parts.kind, ([self.expression(part, where) for part in side] for side in parts[1:])
        inside, mapping = ", ".join(items), dict_of(keys, items)
        builtin = {tuple: tuple_of(items), list: f"[{inside}]", dict: mapping, slice: f"slice({inside})"}
        if kind in builtin:
            return builtin[kind]
        name = self.imported(kind, where)
        if issubclass(kind, tuple | list):
            return f"{name}({inside})" if hasattr(kind, "_fields") else f"{name}([{inside}])"
        is_dataclass = hasattr(kind, "__dataclass_fields__")
        if is_dataclass and kind.__dataclass_params__.init:  # type: ignore[attr-defined]
            return f"{name}({_keyword_arguments(parts.keys, items)})"
        if issubclass(kind, Mapping) and not is_dataclass:
            # A defaultdict is written with no factory, as nothing adds keys to it any more.
            return f"{name}({'None, ' if issubclass(kind, defaultdict) else ''}{mapping})"
        if kind in SUPPORTED_NODES:
            raise not_writable(kind, where)
        return f"with_attributes({name}, {mapping})"

    def call(self, function: str, args: Sequence[Tree], kwargs: Any, where: str) -> str:
        """A call of a module, or of anything else that has a name."""
        arguments = [self.expression(item, where) for item in args]
        if kwargs.items:
            arguments.append(_keyword_arguments(kwargs.keys, [self.expression(item, where) for item in kwargs.items]))
        return f"{function}({', '.join(arguments)})"

    def function_call(self, function: Any, args: Any, kwargs: Any, where: str) -> str:
        """A call of a function, with operators where a reader expects them.

        It may be a statement, such as `x[0] = y`, which leaves its result in its first operand.
        """
        name = tensor_attribute(function)
        if name is None or not args.items or not self._is_tensor(args.items[0]):
            return self.call(self.imported(function, where), args.items, kwargs, where)
        if not kwargs.items and (special := self._operator(name, args.items, where)):
            return special
        return self.call(f"{self.expression(args.items[0], where)}.{name}", args.items[1:], kwargs, where)

    def _operator(self, name: str, operands: tuple[Tree, ...], where: str) -> str:
        """An operator, index or attribute; "" for an ordinary method."""
        first, *rest = [self.expression(operand, where) for operand in operands]
        attribute_name, _, accessor = name.partition(".")
        if accessor:
            return f"{first}.{attribute_name}" + (f" = {rest[0]}" if accessor == "__set__" else "")
        if name in ("__getitem__", "__setitem__"):
            item = f"{first}[{self._index(operands[1], where)}]"
            return f"{item} = {rest[1]}" if name == "__setitem__" else item
        is_number = isinstance(operands[-1], bool | int | float)
        reflected, in_place = is_number and _REFLECTED.get(name), isinstance(operands[0], Ref) and _IN_PLACE.get(name)
        form = _FORMS.get(name) or reflected or in_place or ""
        # A form may need two operands: `add(x)` is no operator.
        is_operator = form.count("{") == len(operands) and (is_number or self._is_tensor(operands[-1]))
        return form.format(first, *rest) if is_operator else ""

    def _index(self, tree: Tree, where: str) -> str:
        """An index; slices in it are written with colons."""

        def entry(tree: Tree) -> str:
            if isinstance(tree, Container) and self.recording.live[tree.kind] is slice:
                return ":".join("" if item is None else self.expression(item, where) for item in tree.items)
            return self.expression(tree, where)

        if isinstance(tree, Container) and self.recording.live[tree.kind] is tuple and tree.items:
            return "".join(f"{entry(item)}, " for item in tree.items)
        return entry(tree)

    def _is_tensor(self, tree: Tree) -> bool:
        is_constant = isinstance(tree, ObjectRef) and isinstance(self.recording.live[tree.key], Tensor)
        return is_constant or isinstance(tree, Ref | State)


def _keyword_arguments(names: Sequence[Any], items: Iterable[str]) -> str:
    """Arguments by keyword; as `**{...}` if a name is not an identifier."""
    if not all(map(is_identifier, names)):
        return f"**{dict_of(map(repr, names), items)}"
    return ", ".join(f"{name}={item}" for name, item in zip(names, items, strict=True))


def not_writable(thing: Any, where: str) -> CodeError:
    """The error for an object that has no expression."""
    thing = applied_function(thing) or thing
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return CodeError(
        "the model uses an object that cannot be written as Python code",
        object=f"{named.__module__}.{named.__qualname__}",
        where=where or "the model",
        hint="define it at the top of a module that can be imported, or keep the module around it whole (basic_blocks)",
    )
