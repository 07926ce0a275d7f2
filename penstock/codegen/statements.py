"""The calls and guards of one stage as Python statements, with comments on shapes and modules."""

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from penstock.codegen.expressions import Expressions, access, expect, tuple_of
from penstock.codegen.names import Names, is_plain_path
from penstock.errors import CodeError
from penstock.ir import TENSOR, Call, CallContext, Graph, Guard, Parts, Ref

_MAX_NUMBERS = 64
"""numbers of an array that a guard is compared with"""
# fmt: off
_SHAPE_FOLLOWS = frozenset(
    {
        "add", "addmm", "baddbmm", "bmm", "cat", "clone", "contiguous", "conv1d", "conv2d", "cos", "cumsum", "div",
        "dropout", "embedding", "empty_like", "expand", "flatten", "float", "gelu", "layer_norm", "linear", "matmul",
        "mean", "mul", "neg", "permute", "pow", "relu", "repeat", "reshape", "rsqrt", "scaled_dot_product_attention",
        "sigmoid", "silu", "sin", "softmax", "split", "squeeze", "stack", "sub", "tanh", "to", "transpose", "unsqueeze",
        "view", "zeros_like",
    }
)
# fmt: on
"""functions whose result has a shape that follows from the shapes of the arguments, so that it needs no check"""
NO_CONTEXT = CallContext()


@dataclass(frozen=True)
class Statement:
    """One statement, the context that it runs in, a comment beside it and one above it."""

    code: str
    context: CallContext = NO_CONTEXT
    comment: str = ""
    heading: str = ""


@dataclass(frozen=True)
class StepWriter:
    """Writes the steps of one stage."""

    expressions: Expressions
    names: Names
    read: Collection[str]
    """the variables that are read, in this stage or by the stages that it sends to"""

    @property
    def _graph(self) -> Graph:
        return self.expressions.recording.graph

    def statements(self, steps: Collection[Call | Guard]) -> Iterator[Statement]:
        """All statements, with a comment above where the forward of another module begins."""
        scope, context = "", NO_CONTEXT
        for step in steps:
            if isinstance(step, Guard):
                yield Statement(self._guard(step), context)
                continue
            context = step.context
            node = self._graph[step.name]
            heading = ""
            if not node.is_block and node.module != scope:
                scope = node.module
                heading = f"in {scope}" if is_plain_path(scope) else "in the model itself" if not scope else ""
            for statement in self._call(step):
                yield replace(statement, heading=heading)
                heading = ""

    def _guard(self, guard: Guard) -> str:
        """A Python value that the model read from a tensor and that must be the same again."""
        live, where = self.expressions.recording.live, f"{guard.scope or 'the model'}, {guard.name}"
        found, _ = self.expressions.function_call(live[guard.target], guard.args, guard.kwargs, where)
        expected = live[guard.expected].value
        if isinstance(expected, np.ndarray):
            if expected.size > _MAX_NUMBERS:
                raise CodeError(
                    "the model decides by an array that is too large to write down",
                    where=where,
                    numbers=expected.size,
                    hint="keep the module that decides whole (basic_blocks)",
                )
            found, expected = f"({found}).tolist()", expected.tolist()
        return expect(found, self.expressions.constant(expected, where), where)

    def _call(self, step: Call) -> Iterator[Statement]:
        """The call, the statements that unpack its result, and checks of sizes that the model read."""
        expressions, recording, makers = self.expressions, self.expressions.recording, self._graph.makers
        new = [v for v in dict.fromkeys(step.results.values) if v in makers and makers[v].name == step.name]
        first, *rest = self._call_and_unpack(step)
        yield Statement(first, step.context, ", ".join(str(self._graph.spec(value)) for value in new))
        for code in rest:
            yield Statement(code, step.context)
        for value, buffer in step.results.updates:
            code = f"{expressions.variables[value]} = {expressions.part(buffer)}"
            if value in recording.state_views:
                yield Statement(code, step.context)
                continue
            # The next forward writes the buffer again, so the value is a copy. Even after a call without gradients
            # the buffer may be part of a graph.
            yield Statement(f"{code}.clone()", CallContext(grad=True) if step.context.grad is False else NO_CONTEXT)
        node = self._graph[step.name]
        if not node.is_block and node.kind in _SHAPE_FOLLOWS:
            return
        for value in new:
            if value in recording.record.size_reads:
                name, shape = expressions.variables[value], repr(tuple(self._graph.spec(value).shape))
                yield Statement(expect(f"tuple({name}.shape)", shape, f"the size of {name}"), step.context)

    def _call_and_unpack(self, step: Call) -> list[str]:
        """The call and the statements that unpack its result."""
        recording, where, is_statement = self.expressions.recording, step.name, False
        if step.changes_arguments:
            function = (
                self.expressions.part(step.target)
                if step.is_module
                else self.expressions.imported(recording.live[step.target], where)
            )
            code = self.expressions.changing_call(function, step.args, step.kwargs, where)
        elif step.is_module:
            code = self.expressions.module_call(self.expressions.part(step.target), step.args, step.kwargs, where)
        else:
            function = recording.live[step.target]
            code, is_statement = self.expressions.function_call(function, step.args, step.kwargs, where)
        if is_statement:
            return [code]
        if step.results.structure == TENSOR:
            variable = self.expressions.variables.get(step.results.values[0])
            updated = {self.expressions.variables[new] for new, _ in step.results.updates}
            return [f"{variable} = {code}" if variable in self.read and variable not in updated else code]
        # Every tensor in the result gets the variable of its value; the rest must equal the recorded result.
        result = recording.returned[where]
        if isinstance(result, Parts) and any(
            self._variable(leaf) != "_" if isinstance(leaf, Ref) else _is_checked(leaf) for leaf in _leaves(result)
        ):
            return list(self._unpack(code, result, where))
        return [self._expect_result(code, result, where) if _is_checked(result) and result is not None else code]

    def _unpack(self, code: str, result: Any, where: str) -> Iterator[str]:
        """Assign the tensors in the result of `code` to their variables, and check everything else."""
        if isinstance(result, Ref):
            if self._variable(result) != "_":
                yield f"{self._variable(result)} = {code}"
        elif not isinstance(result, Parts):
            if _is_checked(result):
                yield self._expect_result(code, result, where)
        elif issubclass(result.kind, list | tuple) and result.items:
            later: list[tuple[str, Any]] = []
            yield f"{tuple_of(self._target(item, later) for item in result.items)} = {code}"
            for variable, inner in later:
                yield from self._unpack(variable, inner, where)
        else:
            if not code.isidentifier():
                whole = self.names.fresh(result.kind.__name__.lower())
                yield f"{whole} = {code}"
                code = whole
            if issubclass(result.kind, list | tuple):
                yield self._expect_result(f"len({code})", 0, where)
            if issubclass(result.kind, Mapping):
                yield self._expect_result(f"list({code})", list(result.keys), where)
            for key, item in zip(result.keys, result.items, strict=True):
                key_code = self.expressions.constant(key, where)
                yield from self._unpack(access(code, result.kind, key, key_code), item, where)

    def _target(self, item: Any, later: list[tuple[str, Any]]) -> str:
        """The target of an item in an assignment; one that must still be checked or unpacked is added to `later`."""
        if isinstance(item, Ref):
            return self._variable(item)
        if isinstance(item, Parts) and issubclass(item.kind, list | tuple) and item.items:
            return tuple_of(self._target(inner, later) for inner in item.items)
        if not isinstance(item, Parts) and not _is_checked(item):
            return "_"
        is_number = isinstance(item, int | float)
        base = "part" if isinstance(item, Parts) else "none" if item is None else "number" if is_number else "word"
        later.append((self.names.fresh(base), item))
        return later[-1][0]

    def _variable(self, ref: Ref) -> str:
        found = self.expressions.variables.get(ref.value, "_")
        return found if found in self.read else "_"

    def _expect_result(self, found: str, recorded: Any, where: str) -> str:
        return expect(found, self.expressions.constant(recorded, where), f"the result of {where}")


def _leaves(result: Parts) -> Iterator[Any]:
    for item in result.items:
        yield from _leaves(item) if isinstance(item, Parts) else (item,)


def _is_checked(leaf: Any) -> bool:
    """Whether a result that is not a tensor is compared with the recorded one."""
    return type(leaf) in (bool, int, float, str, type(None)) or isinstance(leaf, torch.dtype | enum.Enum)
