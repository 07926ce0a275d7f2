"""Entry: the function of a generated file that takes the arguments of the model and runs all stages."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.codegen import support
from penstock.codegen.layout import Chain, Code, call, display, docstring, lines, quoted
from penstock.codegen.names import is_plain
from penstock.codegen.stage_class import StageClass
from penstock.codegen.terms import Terms
from penstock.ir import take_apart

_INDENT = "    "


class Entry:
    """Writes `run`."""

    def __init__(self, captured: Any, stages: Sequence[StageClass], terms: Terms) -> None:
        self._captured, self._stages, self._terms = captured, stages, terms
        self._needed = {name for stage in stages for name in stage.section.inputs}

    @property
    def lines(self) -> list[str]:
        """The text of the function."""
        purpose = "The stages one after another, called like the model; returns what the model returns."
        statements = (line for code in self._statements() for line in lines(code, _INDENT))
        return ["def run(model, /, *args, **kwargs):", *docstring([purpose], _INDENT), *statements]

    def _statements(self) -> Iterator[Code]:
        recorded, added = self._recorded()
        kwargs: Code = "kwargs"
        if added:
            items = [Chain((quoted(name), ": ", self._constant(value, name))) for name, value in added.items()]
            kwargs = display("{", [*items, "**kwargs"], "}")
        yield Chain(("given = ", call("arguments", ["model", "args", kwargs])))
        names = display("[", map(quoted, sorted(recorded)), "]")
        yield call("expect", ["sorted(given)", names, quoted("the list of arguments")])
        for name, value in recorded.items():
            yield from self._taken(f"given[{quoted(name)}]", name, value)
        for stage in self._stages:
            made = call(call(stage.name, ["model"]), stage.taken)
            if stage.section.is_last:
                yield Chain(("return ", made))
            else:
                yield Chain((f"{', '.join(stage.returned)} = ", made)) if stage.returned else made

    def _recorded(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments that were recorded and are not left at their defaults, and what was added to the caller's."""
        args, kwargs = self._captured.recorded_example
        added = {name: value for name, value in kwargs.items() if name not in self._captured.example[1]}
        return support.arguments(self._captured.model, args, kwargs), added

    def _taken(self, code: Code, name: str, value: Any) -> Iterator[Code]:
        """The tensors of an argument by their variables; all else must be what it was."""
        if isinstance(value, Tensor):
            if name in self._needed:
                yield Chain((f"{self._terms.variables[name]} = ", code))
            return
        parts = take_apart(value)
        if parts is None:
            yield call("expect", [code, self._constant(value, name), quoted(name)])
            return
        is_mapping, is_list = issubclass(parts.kind, Mapping), issubclass(parts.kind, list | tuple)
        if is_mapping:
            keys = display("[", [self._constant(key, name) for key in parts.keys], "]")
            yield call("expect", [call("list", [code]), keys, quoted(f"the keys of {name}")])
        elif is_list:
            yield call("expect", [call("len", [code]), str(len(parts.items)), quoted(f"the length of {name}")])
        for key, item in zip(parts.keys, parts.items, strict=True):
            inner = self._item(code, key, name) if is_mapping or is_list else _field(code, str(key))
            yield from self._taken(inner, f"{name}.{key}", item)

    def _item(self, code: Code, key: Any, name: str) -> Code:
        return Chain((code, "[", self._constant(key, name), "]"))

    def _constant(self, value: Any, name: str) -> Code:
        if isinstance(value, torch.device):
            return call("torch.device", [quoted(str(value))])
        return self._terms.constant(value, f"the argument {name}")


def _field(code: Code, key: str) -> Code:
    return Chain((code, f".{key}")) if is_plain(key) else call("getattr", [code, quoted(key)])
