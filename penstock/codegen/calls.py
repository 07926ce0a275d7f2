"""Calls: what a call of a function looks like in Python, with operators where a reader expects them."""

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.codegen.functions import tensor_attribute
from penstock.codegen.layout import Chain, Code, call, display, flat, index
from penstock.codegen.terms import Terms, keyword_arguments
from penstock.ir import Container, ObjectRef, Ref, State, Tree

# fmt: off
_BINARY = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@", "pow": "**", "remainder": "%",
    "__add__": "+", "__sub__": "-", "__mul__": "*", "__truediv__": "/", "__matmul__": "@", "__pow__": "**",
    "__mod__": "%", "__floordiv__": "//", "__and__": "&", "__or__": "|", "__xor__": "^", "__lshift__": "<<",
    "__rshift__": ">>", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "__eq__": "==", "__ne__": "!=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=",
}
# fmt: on
_REFLECTED = {"__rsub__": "-", "__rpow__": "**", "__rdiv__": "/", "__rtruediv__": "/", "__rfloordiv__": "//"}
_IN_PLACE = {"add_": "+=", "sub_": "-=", "mul_": "*=", "div_": "/="}
_UNARY = {"neg": "-", "__neg__": "-", "__invert__": "~"}
_BUILT_IN = {"__bool__": "bool", "__int__": "int", "__float__": "float", "__complex__": "complex"}
_SIMPLE = re.compile(r"-?[\w.]+", re.ASCII)


@dataclass(frozen=True)
class Written:
    """A call as code: an expression, or a statement that leaves its result in its first operand."""

    code: Code
    is_statement: bool = False


def module_call(terms: Terms, module: Code, args: Tree, kwargs: Tree, where: str) -> Code:
    """A call of a module, or of whatever goes by a name."""
    return call(module, _arguments(terms, args, kwargs, where))


def function_call(terms: Terms, function: Any, args: Tree, kwargs: Tree, where: str) -> Written:
    """A call of a function."""
    assert isinstance(args, Container)
    assert isinstance(kwargs, Container)
    name = tensor_attribute(function)
    if name is None or not args.items or not _is_tensor(terms, args.items[0]):
        return Written(module_call(terms, terms.imported(function, where), args, kwargs, where))
    if not kwargs.items:
        special = _special(terms, name, args.items, where)
        if special is not None:
            return special
    rest = Container(args.kind, args.keys[1:], args.items[1:])
    owner = Chain((terms.code(args.items[0], where), f".{name}"))
    return Written(module_call(terms, owner, rest, kwargs, where))


def _arguments(terms: Terms, args: Tree, kwargs: Tree, where: str) -> list[Code]:
    assert isinstance(args, Container)
    assert isinstance(kwargs, Container)
    keys, items = ([terms.code(part, where) for part in side] for side in (kwargs.keys, kwargs.items))
    return [*(terms.code(item, where) for item in args.items), *(keyword_arguments(keys, items) if keys else ())]


def _special(terms: Terms, name: str, operands: tuple[Tree, ...], where: str) -> Written | None:
    """Operators, indices and attributes; None for an ordinary method."""
    codes = [terms.code(operand, where) for operand in operands]
    first = codes[0]
    attribute, _, accessor = name.partition(".")
    if accessor:
        ending: tuple[Code, ...] = (" = ", codes[1]) if accessor == "__set__" else ()
        return Written(Chain((first, f".{attribute}", *ending)), is_statement=bool(ending))
    if name in ("__getitem__", "__setitem__"):
        item = Chain((first, _index(terms, operands[1], where)))
        is_set = name == "__setitem__"
        return Written(Chain((item, " = ", codes[2])) if is_set else item, is_statement=is_set)
    if len(codes) == 1 and name in _BUILT_IN:
        return Written(call(_BUILT_IN[name], codes))
    return _operator(terms, name, operands, codes)


def _operator(terms: Terms, name: str, operands: tuple[Tree, ...], codes: list[Code]) -> Written | None:
    if len(codes) == 1 and name in _UNARY:
        return Written(Chain((_UNARY[name], codes[0])))
    if len(codes) != 2 or not (_is_tensor(terms, operands[1]) or _is_number(operands[1])):
        return None
    if name in _IN_PLACE and isinstance(operands[0], Ref):
        return Written(_infix(codes[0], _IN_PLACE[name], codes[1]), is_statement=True)
    if name in _BINARY:
        return Written(_infix(codes[0], _BINARY[name], codes[1]))
    if name in _REFLECTED and _is_number(operands[1]):
        # A sign binds less than a power does.
        left = Chain(("(", codes[1], ")")) if flat(codes[1]).startswith("-") else codes[1]
        return Written(_infix(left, _REFLECTED[name], codes[0]))
    return None


def _infix(left: Code, operator: str, right: Code) -> Code:
    is_close = operator == "**" and all(_SIMPLE.fullmatch(flat(side)) for side in (left, right))
    return Chain((left, operator if is_close else f" {operator} ", right))


def _index(terms: Terms, tree: Tree, where: str) -> Code:
    """An index with its brackets."""
    if not isinstance(tree, Container) or terms.recording.live[tree.kind] is not tuple or not tree.items:
        return index(_place(terms, tree, where))
    found = [_place(terms, item, where) for item in tree.items]
    return display("[", found, "]") if len(found) > 1 else Chain(("[", found[0], ",]"))


def _place(terms: Terms, tree: Tree, where: str) -> Code:
    if not isinstance(tree, Container) or terms.recording.live[tree.kind] is not slice:
        return terms.code(tree, where)
    start, stop, step = ("" if item is None else terms.code(item, where) for item in tree.items)
    return Chain((start, ":", stop, *((":", step) if step else ())))


def _is_tensor(terms: Terms, tree: Tree) -> bool:
    is_constant = isinstance(tree, ObjectRef) and isinstance(terms.recording.live[tree.key], Tensor)
    return is_constant or isinstance(tree, Ref | State)


def _is_number(tree: Tree) -> bool:
    return isinstance(tree, bool | int | float)
