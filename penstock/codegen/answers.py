"""Answers: takes apart what a call returns, so that every tensor in it gets the variable of its value."""

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.codegen.layout import Chain, Code, call, display, quoted
from penstock.codegen.names import Names, is_plain
from penstock.codegen.terms import Terms
from penstock.ir import Parts, Ref

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Answers:
    """Statements that come after a call."""

    terms: Terms
    names: Names
    read: Collection[str]
    """the variables that somebody reads"""

    def statements(self, code: Code, answer: Any, where: str) -> Iterator[Code]:
        """The call, and what takes its result apart; what is no tensor must be what was recorded."""
        if isinstance(answer, Parts) and any(map(self._matters, _leaves(answer))):
            yield from self._bound(code, answer, where)
        elif _is_told(answer) and answer is not None:
            yield self._expected(code, self.terms.constant(answer, where), where)
        else:
            yield code

    def _matters(self, leaf: Any) -> bool:
        return self._variable(leaf) != "_" if isinstance(leaf, Ref) else _is_told(leaf)

    def _bound(self, code: Code, answer: Parts, where: str) -> Iterator[Code]:
        if issubclass(answer.kind, list | tuple) and answer.items:
            later: list[tuple[str, Any]] = []
            target = self._pattern(answer, later)
            yield Chain((target, " = ", code))
            for variable, inner in later:
                yield from self._leaf(variable, inner, where)
            return
        whole = self.names.fresh(answer.kind.__name__.lower())
        yield Chain((whole, " = ", code))
        yield from self._leaf(whole, answer, where)

    def _leaf(self, variable: str, answer: Any, where: str) -> Iterator[Code]:
        """What is found in a variable is looked at or taken apart."""
        if not isinstance(answer, Parts):
            if _is_told(answer):
                yield self._expected(variable, self.terms.constant(answer, where), where)
            return
        if issubclass(answer.kind, list | tuple):
            if answer.items:
                yield from self._bound(variable, answer, where)
            else:
                yield self._expected(f"len({variable})", "0", where)
            return
        if issubclass(answer.kind, Mapping):
            keys = display("[", [self.terms.constant(key, where) for key in answer.keys], "]")
            yield self._expected(call("list", [variable]), keys, where)
        for key, item in zip(answer.keys, answer.items, strict=True):
            yield from self._item(self._access(variable, answer.kind, key, where), item, where)

    def _item(self, code: Code, item: Any, where: str) -> Iterator[Code]:
        if isinstance(item, Ref):
            if self._variable(item) != "_":
                yield Chain((self._variable(item), " = ", code))
        elif isinstance(item, Parts):
            yield from self._bound(code, item, where)
        elif _is_told(item):
            yield self._expected(code, self.terms.constant(item, where), where)

    def _access(self, variable: str, kind: type, key: Any, where: str) -> Code:
        if issubclass(kind, Mapping):
            return Chain((variable, "[", self.terms.constant(key, where), "]"))
        return f"{variable}.{key}" if is_plain(str(key)) else call("getattr", [variable, quoted(str(key))])

    def _pattern(self, answer: Parts, later: list[tuple[str, Any]]) -> Code:
        """The left side of an assignment; what cannot stand in it is bound to a name of its own."""
        found = [self._place(item, later) for item in answer.items]
        return display("(", found, ")") if len(found) == 1 else _joined(found)

    def _place(self, item: Any, later: list[tuple[str, Any]]) -> Code:
        if isinstance(item, Ref):
            return self._variable(item)
        if isinstance(item, Parts) and issubclass(item.kind, list | tuple) and item.items:
            return display("(", [self._place(inner, later) for inner in item.items], ")")
        if isinstance(item, Parts) or _is_told(item):
            name = self.names.fresh(_wish(item))
            later.append((name, item))
            return name
        return "_"

    def _variable(self, ref: Ref) -> str:
        found = self.terms.variables.get(ref.value, "_")
        return found if found in self.read else "_"

    def _expected(self, found: Code, recorded: Code, where: str) -> Code:
        return call("expect", [found, recorded, quoted(f"what {where} returns")])


def _joined(codes: list[Code]) -> Code:
    first, *rest = codes
    return Chain((first, *(piece for code in rest for piece in (", ", code))))


def _leaves(answer: Any) -> Iterator[Any]:
    for item in answer.items if isinstance(answer, Parts) else (answer,):
        yield from _leaves(item) if isinstance(item, Parts) else (item,)


def _is_told(leaf: Any) -> bool:
    """Whether a result that is no tensor is compared with the recorded one."""
    return type(leaf) in _PLAIN or isinstance(leaf, torch.dtype | enum.Enum)


def _wish(item: Any) -> str:
    if isinstance(item, Parts):
        return "part"
    return "none" if item is None else "number" if isinstance(item, int | float) else "word"
