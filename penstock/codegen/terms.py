"""Terms: what calls are given, as Python expressions: values, parts of the model, containers and constants."""

import enum
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.codegen.constants import Constants
from penstock.codegen.functions import applied_function, function_code
from penstock.codegen.imports import Imports
from penstock.codegen.layout import Chain, Code, call, display, flat, named, quoted
from penstock.codegen.names import is_plain, part_code
from penstock.errors import CodeError
from penstock.ir import Container, ObjectRef, Ref, State, Tree, take_apart

_WORDS = (torch.dtype, torch.layout, torch.memory_format)
_LITERALS = (complex, bytes)


@dataclass(frozen=True)
class Terms:
    """The expressions of one stage."""

    recording: Any
    variables: Mapping[str, str]
    leaves: Collection[str]
    """modules of the model that the stage holds whole"""
    imports: Imports
    constants: Constants

    def code(self, tree: Tree, where: str) -> Code:
        """The expression for a tree; `where` says for whom, should there be none."""
        if isinstance(tree, Ref):
            return self.variables[tree.value]
        if isinstance(tree, State):
            return part_code(tree.name, self.leaves)
        if isinstance(tree, ObjectRef):
            return self.constant(self.recording.live[tree.key], where)
        if isinstance(tree, Container):
            items = [self.code(item, where) for item in tree.items]
            keys = [self.code(key, where) for key in tree.keys]
            return self.container(self.recording.live[tree.kind], keys, items, where)
        return _plain(tree)

    def container(self, kind: type, keys: list[Code], items: list[Code], where: str) -> Code:
        """A container of some class, as `put_together` makes it."""
        if kind in (tuple, list):
            return display("(", items, ")") if kind is tuple else display("[", items, "]")
        if kind is slice:
            return call("slice", items)
        if kind is dict:
            return _dict(keys, items)
        name = self.imported(kind, where)
        if issubclass(kind, tuple | list):
            return call(name, items if hasattr(kind, "_fields") else [display("[", items, "]")])
        if hasattr(kind, "__dataclass_fields__"):
            if not kind.__dataclass_params__.init:  # type: ignore[attr-defined]
                raise _unwritten(kind, where)
            return call(name, keyword_arguments(keys, items))
        return call(name, ["None"] * issubclass(kind, defaultdict) + [_dict(keys, items)])

    def constant(self, thing: Any, where: str) -> Code:
        """Something that is the same in every forward."""
        if thing is None or type(thing) in (bool, int, float, str):
            return _plain(thing)
        if isinstance(thing, Tensor):
            return self.constants.code(thing)
        if isinstance(thing, torch.device):
            is_home = str(thing) == self.recording.device
            return "self.device" if is_home else f"torch.device({quoted(str(thing))})"
        if isinstance(thing, _WORDS) and getattr(torch, str(thing).removeprefix("torch."), None) is thing:
            return str(thing)
        if thing is ... or type(thing) in _LITERALS:
            return "..." if thing is ... else repr(thing)
        if type(thing) is range:
            return call("range", [repr(int(end)) for end in (thing.start, thing.stop, thing.step)])
        if isinstance(thing, enum.Enum) and thing.name in type(thing).__members__:
            return f"{self.imported(type(thing), where)}[{quoted(thing.name)}]"
        if isinstance(thing, np.generic) and not isinstance(thing.item(), np.generic):
            return call(self.imported(type(thing), where), [self.constant(thing.item(), where)])
        if type(thing) in (set, frozenset):
            items = [self.constant(item, where) for item in sorted(thing, key=repr)]
            return call(type(thing).__name__, [display("[", items, "]")])
        if (parts := take_apart(thing)) is not None:
            keys, items = ([self.constant(item, where) for item in side] for side in (parts.keys, parts.items))
            return self.container(parts.kind, keys, items, where)
        return self.imported(thing, where)

    def imported(self, thing: Any, where: str) -> str:
        """A class or function by its name."""
        found = function_code(thing, self.imports) if callable(thing) else None
        if found is None:
            raise _unwritten(thing, where)
        return found


def keyword_arguments(keys: list[Code], items: list[Code]) -> list[Code]:
    """Arguments given by keyword, also by those that Python has no word for."""
    names = [flat(key)[1:-1] for key in keys]
    if all(map(is_plain, names)):
        return [named(name, item) for name, item in zip(names, items, strict=True)]
    return [Chain(("**", _dict(keys, items)))]


def _dict(keys: list[Code], items: list[Code]) -> Code:
    pairs = zip(keys, items, strict=True)
    return display("{", [Chain((key, ": ", item)) for key, item in pairs], "}")


def _plain(value: bool | int | float | str | None) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({quoted(str(value))})"
    return repr(value).replace("e+", "e")


def _unwritten(thing: Any, where: str) -> CodeError:
    thing = applied_function(thing) or thing
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return CodeError(
        "the model uses something that cannot be written as Python code",
        what=f"{named.__module__}.{named.__qualname__}",
        where=where or "the model",
        hint="define it at the top of a module that can be imported, or keep the module around it whole (basic_blocks)",
    )
