"""Python expressions for the arguments and calls of a recording, as `ast` nodes."""

import ast
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

from penstock.codegen import support
from penstock.codegen.names import Imports, applied_function, is_identifier, is_index, tensor_attribute
from penstock.errors import CodeError
from penstock.ir import Container, ObjectRef, Ref, State, Tree, take_apart

# fmt: off
_BINARY: dict[str, type[ast.operator]] = {
    "add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "matmul": ast.MatMult, "pow": ast.Pow,
    "remainder": ast.Mod, "__add__": ast.Add, "__sub__": ast.Sub, "__mul__": ast.Mult, "__truediv__": ast.Div,
    "__matmul__": ast.MatMult, "__pow__": ast.Pow, "__mod__": ast.Mod, "__floordiv__": ast.FloorDiv,
    "__and__": ast.BitAnd, "__or__": ast.BitOr, "__xor__": ast.BitXor, "__lshift__": ast.LShift,
    "__rshift__": ast.RShift,
}
_COMPARISONS: dict[str, type[ast.cmpop]] = {
    "eq": ast.Eq, "ne": ast.NotEq, "lt": ast.Lt, "le": ast.LtE, "gt": ast.Gt, "ge": ast.GtE,
}
_COMPARISONS |= {f"__{name}__": operator for name, operator in _COMPARISONS.items()}
_REFLECTED: dict[str, type[ast.operator]] = {
    "__rsub__": ast.Sub, "__rpow__": ast.Pow, "__rdiv__": ast.Div, "__rtruediv__": ast.Div,
    "__rfloordiv__": ast.FloorDiv,
}
_IN_PLACE: dict[str, type[ast.operator]] = {"add_": ast.Add, "sub_": ast.Sub, "mul_": ast.Mult, "div_": ast.Div}
_UNARY: dict[str, type[ast.unaryop]] = {"neg": ast.USub, "__neg__": ast.USub, "__invert__": ast.Invert}
_CONVERSIONS = {"__bool__": "bool", "__int__": "int", "__float__": "float", "__complex__": "complex"}
_INLINE_DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
)
# fmt: on
_MAX_INLINE = 16
"""elements of a constant tensor that is written in the code"""
_STAGE_ATTRIBUTES = frozenset((*dir(support.Stage), *support.Stage.__annotations__, "training"))
"""attributes of a stage that are not parts of the model"""

# ------------------------------------------------------------------------------------------------ building nodes


def dotted(path: str) -> ast.expr:
    """`a.b.c`; every word must be an identifier."""
    first, *rest = path.split(".")
    found: ast.expr = ast.Name(first, ast.Load())
    for word in rest:
        found = ast.Attribute(found, word, ast.Load())
    return found


def literal(value: bool | int | float | complex | str | bytes | tuple[int, ...] | None) -> ast.expr:
    """The literal of a plain value; NaN and Inf have none and become calls of `float`."""
    if isinstance(value, float) and not math.isfinite(value):
        return call(dotted("float"), [literal(str(value))])
    if isinstance(value, complex) and not cmath.isfinite(value):
        return call(dotted("complex"), [literal(value.real), literal(value.imag)])
    return ast.parse(repr(value), mode="eval").body


def call(function: ast.expr, args: Iterable[ast.expr], keywords: Iterable[ast.keyword] = ()) -> ast.Call:
    """A call."""
    return ast.Call(function, list(args), list(keywords))


def subscript(value: ast.expr, index: ast.expr) -> ast.Subscript:
    """`value[index]`."""
    return ast.Subscript(value, index, ast.Load())


def attribute(value: ast.expr, name: str) -> ast.expr:
    """`value.name`, or a call of `getattr` where the name is no identifier."""
    # Inside a class, Python changes names that begin with two underscores.
    if is_identifier(name) and not name.startswith("__"):
        return ast.Attribute(value, name, ast.Load())
    return call(dotted("getattr"), [value, literal(name)])


def sequence(kind: type, items: Iterable[ast.expr]) -> ast.expr:
    """A tuple or list."""
    return ast.Tuple(list(items), ast.Load()) if kind is tuple else ast.List(list(items), ast.Load())


def dictionary(keys: Sequence[ast.expr], items: Sequence[ast.expr]) -> ast.Dict:
    """A dict."""
    return ast.Dict(list(keys), list(items))


def keyword_arguments(keys: Sequence[ast.expr], items: Sequence[ast.expr]) -> list[ast.keyword]:
    """Arguments by keyword; as `**{...}` if a key is no identifier."""
    names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
    if not all(isinstance(name, str) and is_identifier(name) for name in names):
        return [ast.keyword(None, dictionary(keys, items))]
    return [ast.keyword(name, item) for name, item in zip(names, items, strict=True)]


def assign(target: ast.expr, value: ast.expr) -> ast.stmt:
    """`target = value`."""
    for node in ast.walk(target) if isinstance(target, ast.Tuple | ast.List) else [target]:
        if hasattr(node, "ctx"):
            node.ctx = ast.Store()
    return ast.Assign([target], value)


def part_of_stage(path: str, leaves: Collection[str]) -> ast.expr:
    """A module, parameter or buffer of a stage; `leaves` are the modules that the stage holds whole."""
    words = path.split(".")
    inside = next((n for n in range(1, len(words)) if ".".join(words[:n]) in leaves), len(words))
    found = dotted("self")
    for word in words[:inside]:
        if is_index(word):
            found = subscript(found, literal(int(word)))
        elif is_identifier(word) and not word.startswith("__") and word not in _STAGE_ATTRIBUTES:
            found = attribute(found, word)
        else:
            found = subscript(found, literal(word))
    if inside == len(words):
        return found
    # A module of the model has no `__getitem__` of ours: its parts are reached by its own names.
    owner, name = words[inside:-1], words[-1]
    if owner:
        found = call(attribute(found, "get_submodule"), [literal(".".join(owner))])
    return attribute(found, name)


class ConstantTensors:
    """Tensors that are not part of the model: in the code if they are small, else in a file beside it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[str, Tensor]] = {}

    def expression(self, tensor: Tensor) -> ast.expr:
        """The expression for a tensor."""
        is_usual = tensor.layout is torch.strided and tensor.dtype in _INLINE_DTYPES and tensor.device.type == "cpu"
        if is_usual and 0 < tensor.numel() <= _MAX_INLINE and bool(tensor.isfinite().all()):
            dtype = ast.keyword("dtype", dotted(str(tensor.dtype)))
            return call(dotted("torch.tensor"), [ast.parse(repr(tensor.tolist()), mode="eval").body], [dtype])
        name, _ = self._kept.setdefault(id(tensor), (f"constant{len(self._kept)}", tensor))
        return subscript(dotted("CONSTANTS"), literal(name))

    @property
    def content(self) -> bytes:
        """The content of the file beside the code; empty if it is not needed."""
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in self._kept.values()}
        return save(held) if held else b""

    def statement(self, path: Path) -> ast.stmt | None:
        """The statement that reads the file, which fails if its content is not the one that was written."""
        if not (content := self.content):
            return None
        arguments = [literal(path.name), literal(hashlib.sha256(content).hexdigest())]
        return assign(dotted("CONSTANTS"), call(dotted("constants"), arguments))


# ----------------------------------------------------------------------------------------- expressions of a stage


@dataclass(frozen=True)
class Expressions:
    """The expressions of one stage. `where` in its methods names the caller in errors."""

    recording: Any
    variables: Mapping[str, str]
    """the Python name of every value"""
    leaves: Collection[str]
    """modules of the model that the stage holds whole"""
    imports: Imports
    tensors: ConstantTensors
    copied: Collection[str] = ()
    """values that are written as `x.clone()`"""

    def variable(self, value: str) -> ast.expr:
        """The variable of a value."""
        name = dotted(self.variables[value])
        return call(attribute(name, "clone"), []) if value in self.copied else name

    def part(self, path: str) -> ast.expr:
        """A module, parameter or buffer."""
        return part_of_stage(path, self.leaves)

    def argument(self, tree: Tree, where: str) -> ast.expr:
        """An argument of a recorded call."""
        if isinstance(tree, Ref):
            return self.variable(tree.value)
        if isinstance(tree, State):
            return self.part(tree.name)
        if isinstance(tree, ObjectRef):
            return self.constant(self.recording.live[tree.key], where)
        if isinstance(tree, Container):
            keys, items = ([self.argument(item, where) for item in side] for side in (tree.keys, tree.items))
            return self.container(self.recording.live[tree.kind], keys, items, where)
        return literal(tree)

    def container(self, kind: type, keys: list[ast.expr], items: list[ast.expr], where: str) -> ast.expr:
        """A container of any class, as `put_together` makes it."""
        if kind in (tuple, list):
            return sequence(kind, items)
        if kind is slice:
            return call(dotted("slice"), items)
        if kind is dict:
            return dictionary(keys, items)
        name = self.imported(kind, where)
        if issubclass(kind, tuple | list):
            return call(name, items if hasattr(kind, "_fields") else [sequence(list, items)])
        if hasattr(kind, "__dataclass_fields__"):
            if not kind.__dataclass_params__.init:  # type: ignore[attr-defined]
                raise _not_writable(kind, where)
            return call(name, [], keyword_arguments(keys, items))
        # A defaultdict is written with no factory, which nothing reads any more.
        return call(name, [literal(None)] * issubclass(kind, defaultdict) + [dictionary(keys, items)])

    def constant(self, thing: Any, where: str) -> ast.expr:
        """An object that is the same in every forward."""
        if thing is None or type(thing) in (bool, int, float, str, complex, bytes):
            return literal(thing)
        if isinstance(thing, Tensor):
            return self.tensors.expression(thing)
        if isinstance(thing, torch.device):
            is_home = str(thing) == self.recording.device
            return dotted("self.device") if is_home else call(dotted("torch.device"), [literal(str(thing))])
        is_word = isinstance(thing, torch.dtype | torch.layout | torch.memory_format)
        if is_word and getattr(torch, str(thing).removeprefix("torch."), None) is thing:
            return dotted(str(thing))
        if thing is ...:
            return ast.Constant(...)
        if type(thing) is range:
            return call(dotted("range"), [literal(int(end)) for end in (thing.start, thing.stop, thing.step)])
        if isinstance(thing, enum.Enum) and thing.name in type(thing).__members__:
            return subscript(self.imported(type(thing), where), literal(thing.name))
        if isinstance(thing, np.generic) and not isinstance(thing.item(), np.generic):
            return call(self.imported(type(thing), where), [self.constant(thing.item(), where)])
        if type(thing) in (set, frozenset):
            items = [self.constant(item, where) for item in sorted(thing, key=repr)]
            return call(dotted(type(thing).__name__), [sequence(list, items)])
        if (parts := take_apart(thing)) is not None:
            keys, items = ([self.constant(item, where) for item in side] for side in (parts.keys, parts.items))
            return self.container(parts.kind, keys, items, where)
        return self.imported(thing, where)

    def imported(self, thing: Any, where: str) -> ast.expr:
        """A class or function by its name."""
        path = self.imports.path(thing) if callable(thing) else None
        if path is None:
            raise _not_writable(thing, where)
        return dotted(path)

    # ------------------------------------------------------------------------------------------------------ calls

    def module_call(self, module: ast.expr, args: Tree, kwargs: Tree, where: str) -> ast.Call:
        """A call of a module, or of anything else that has a name."""
        assert isinstance(args, Container)
        assert isinstance(kwargs, Container)
        keys, items = ([self.argument(item, where) for item in side] for side in (kwargs.keys, kwargs.items))
        positional = [self.argument(item, where) for item in args.items]
        return call(module, positional, keyword_arguments(keys, items) if keys else ())

    def function_call(self, function: Any, args: Tree, kwargs: Tree, where: str) -> ast.expr | ast.stmt:
        """A call of a function, with operators where a reader expects them.

        A statement if it leaves its result in its first operand, as `x[0] = y` does.
        """
        assert isinstance(args, Container)
        assert isinstance(kwargs, Container)
        name = tensor_attribute(function)
        if name is None or not args.items or not self._is_tensor(args.items[0]):
            return self.module_call(self.imported(function, where), args, kwargs, where)
        if not kwargs.items and (special := self._operator(name, args.items, where)) is not None:
            return special
        rest = Container(args.kind, args.keys[1:], args.items[1:])
        method = ast.Attribute(self.argument(args.items[0], where), name, ast.Load())
        return self.module_call(method, rest, kwargs, where)

    def _operator(self, name: str, operands: tuple[Tree, ...], where: str) -> ast.expr | ast.stmt | None:
        """An operator, index or attribute; None for an ordinary method."""
        if name in ("__getitem__", "__setitem__"):
            item = subscript(self.argument(operands[0], where), self._index(operands[1], where))
            return item if name == "__getitem__" else assign(item, self.argument(operands[2], where))
        first, *rest = [self.argument(operand, where) for operand in operands]
        attribute_name, _, accessor = name.partition(".")
        if accessor:
            found = ast.Attribute(first, attribute_name, ast.Load())
            return assign(found, rest[0]) if accessor == "__set__" else found
        if not rest:
            if name in _CONVERSIONS:
                return call(dotted(_CONVERSIONS[name]), [first])
            return ast.UnaryOp(_UNARY[name](), first) if name in _UNARY else None
        is_number = isinstance(operands[1], bool | int | float)
        if len(rest) > 1 or not (is_number or self._is_tensor(operands[1])):
            return None
        if name in _IN_PLACE and isinstance(operands[0], Ref):
            return ast.AugAssign(ast.Name(self.variables[operands[0].value], ast.Store()), _IN_PLACE[name](), rest[0])
        if name in _BINARY:
            return ast.BinOp(first, _BINARY[name](), rest[0])
        if name in _COMPARISONS:
            return ast.Compare(first, [_COMPARISONS[name]()], rest)
        return ast.BinOp(rest[0], _REFLECTED[name](), first) if name in _REFLECTED and is_number else None

    def _index(self, tree: Tree, where: str) -> ast.expr:
        """An index; slices in it are written with colons."""

        def entry(tree: Tree) -> ast.expr:
            if isinstance(tree, Container) and self.recording.live[tree.kind] is slice:
                return ast.Slice(*(None if item is None else self.argument(item, where) for item in tree.items))
            return self.argument(tree, where)

        if isinstance(tree, Container) and self.recording.live[tree.kind] is tuple and tree.items:
            return sequence(tuple, map(entry, tree.items))
        return entry(tree)

    def _is_tensor(self, tree: Tree) -> bool:
        is_constant = isinstance(tree, ObjectRef) and isinstance(self.recording.live[tree.key], Tensor)
        return is_constant or isinstance(tree, Ref | State)


def _not_writable(thing: Any, where: str) -> CodeError:
    thing = applied_function(thing) or thing
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return CodeError(
        "the model uses an object that cannot be written as Python code",
        what=f"{named.__module__}.{named.__qualname__}",
        where=where or "the model",
        hint="define it at the top of a module that can be imported, or keep the module around it whole (basic_blocks)",
    )
