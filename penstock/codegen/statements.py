"""The calls and guards of one stage as Python statements, with comments on shapes and modules."""

import ast
import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from penstock.codegen.expressions import Expressions, assign, attribute, call, dotted, literal, sequence, subscript
from penstock.codegen.names import Names, is_plain_path
from penstock.errors import CodeError
from penstock.ir import Call, CallContext, Graph, Guard, Parts, Ref

_TENSOR = "*"
"""the structure of a result that is a single tensor"""
_MAX_NUMBERS = 64
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

    node: ast.stmt
    context: CallContext = NO_CONTEXT
    remark: str = ""
    heading: str = ""


def expect(found: ast.expr, recorded: ast.expr, what: str) -> ast.stmt:
    """A call of `expect` of the generated file: stops if a value differs from the recorded one."""
    return ast.Expr(call(dotted("expect"), [found, recorded, literal(what)]))


def access(container: ast.expr, kind: type, key: Any, key_code: ast.expr) -> ast.expr:
    """An item of a sequence or mapping, or a field of a dataclass."""
    is_item = issubclass(kind, Mapping | list | tuple)
    return subscript(container, key_code) if is_item else attribute(container, str(key))


@dataclass(frozen=True)
class StepWriter:
    """Writes the steps of one stage."""

    expressions: Expressions
    names: Names
    read: Collection[str]
    """the variables that are read, in this stage or by the stages that it sends to"""

    @property
    def _graph(self) -> Graph:
        return self.expressions.recording.graph  # type: ignore[no-any-return]

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
            if not node.is_leaf and node.module != scope:
                scope = node.module
                heading = f"in {scope}" if is_plain_path(scope) else "in the model itself" if not scope else ""
            for statement in self._call(step):
                yield replace(statement, heading=heading)
                heading = ""

    def _guard(self, guard: Guard) -> ast.stmt:
        """A Python value that the model read from a tensor and that must be the same again."""
        live, where = self.expressions.recording.live, f"{guard.scope or 'the model'}, {guard.name}"
        found = self.expressions.function_call(live[guard.target], guard.args, guard.kwargs, where)
        assert isinstance(found, ast.expr)
        expected = live[guard.expected].value
        if isinstance(expected, np.ndarray):
            if expected.size > _MAX_NUMBERS:
                raise CodeError(
                    "the model decides by an array that is too large to write down",
                    where=where,
                    numbers=expected.size,
                    hint="keep the module that decides whole (basic_blocks)",
                )
            found, expected = call(attribute(found, "tolist"), []), expected.tolist()
        return expect(found, self.expressions.constant(expected, where), where)

    def _call(self, step: Call) -> Iterator[Statement]:
        """The call, the statements that unpack its result, and checks of shapes that the model used."""
        variables, makers = self.expressions.variables, self._graph.makers
        new = [v for v in dict.fromkeys(step.results.values) if v in makers and makers[v].name == step.name]
        first, *rest = self._call_nodes(step)
        yield Statement(first, step.context, ", ".join(str(self._graph.spec(value)) for value in new))
        for node in rest:
            yield Statement(node, step.context)
        for value, buffer in step.results.updates:
            target, part = self.expressions.variable(value), self.expressions.part(buffer)
            if value in self.expressions.recording.state_views:
                yield Statement(assign(target, part), step.context)
                continue
            # The next forward writes the buffer again, so the value is a copy. Even after a call without gradients
            # the buffer may be part of a graph.
            context = CallContext(grad=True) if step.context.grad is False else NO_CONTEXT
            yield Statement(assign(target, call(attribute(part, "clone"), [])), context)
        node = self._graph[step.name]
        if not node.is_leaf and node.kind in _SHAPE_FOLLOWS:
            return
        for value in new:
            if value in self.expressions.recording.record.sized:
                shape = call(dotted("tuple"), [attribute(self.expressions.variable(value), "shape")])
                recorded = literal(tuple(self._graph.spec(value).shape))
                yield Statement(expect(shape, recorded, f"the size of {variables[value]}"), step.context)

    def _call_nodes(self, step: Call) -> list[ast.stmt]:
        """The call and the statements that unpack its result."""
        recording = self.expressions.recording
        found: ast.expr | ast.stmt
        if step.is_module:
            module = self.expressions.part(step.target)
            found = self.expressions.module_call(module, step.args, step.kwargs, step.name)
        else:
            function = recording.live[step.target]
            found = self.expressions.function_call(function, step.args, step.kwargs, step.name)
        if isinstance(found, ast.stmt):
            return [found]
        if step.results.structure != _TENSOR:
            return list(self._unpack_result(found, recording.returned[step.name], step.name))
        value = step.results.values[0]
        updated = {self.expressions.variables[new] for new, _ in step.results.updates}
        variable = self.expressions.variables.get(value)
        is_bound = variable in self.read and variable not in updated
        return [assign(dotted(variable), found) if variable and is_bound else ast.Expr(found)]

    # ----------------------------------------------------------------------------------- results that are containers

    def _unpack_result(self, code: ast.expr, result: Any, where: str) -> Iterator[ast.stmt]:
        """Binds every tensor in a result to the variable of its value; the rest must equal the recorded result."""
        if isinstance(result, Parts) and any(map(self._matters, _leaves(result))):
            yield from self._unpack(code, result, where)
        elif _is_checked(result) and result is not None:
            yield self._expect_result(code, result, where)
        else:
            yield ast.Expr(code)

    def _unpack(self, code: ast.expr, result: Parts, where: str) -> Iterator[ast.stmt]:
        if issubclass(result.kind, list | tuple) and result.items:
            later: list[tuple[str, Any]] = []
            yield assign(sequence(tuple, [self._target(item, later) for item in result.items]), code)
            for variable, inner in later:
                yield from self._unpack_variable(variable, inner, where)
            return
        whole = self.names.fresh(result.kind.__name__.lower())
        yield assign(dotted(whole), code)
        yield from self._unpack_variable(whole, result, where)

    def _target(self, item: Any, later: list[tuple[str, Any]]) -> ast.expr:
        """An item on the left of an assignment; one that must be checked or unpacked gets a name in `later`."""
        if isinstance(item, Ref):
            return dotted(self._variable(item))
        if isinstance(item, Parts) and issubclass(item.kind, list | tuple) and item.items:
            return sequence(tuple, [self._target(inner, later) for inner in item.items])
        if isinstance(item, Parts) or _is_checked(item):
            is_number = isinstance(item, int | float)
            wish = "part" if isinstance(item, Parts) else "none" if item is None else "number" if is_number else "word"
            name = self.names.fresh(wish)
            later.append((name, item))
            return dotted(name)
        return dotted("_")

    def _unpack_variable(self, variable: str, result: Any, where: str) -> Iterator[ast.stmt]:
        """Checks or unpacks the content of a variable."""
        if not isinstance(result, Parts):
            if _is_checked(result):
                yield self._expect_result(dotted(variable), result, where)
            return
        if issubclass(result.kind, list | tuple):
            if result.items:
                yield from self._unpack(dotted(variable), result, where)
            else:
                yield self._expect_result(call(dotted("len"), [dotted(variable)]), 0, where)
            return
        if issubclass(result.kind, Mapping):
            yield self._expect_result(call(dotted("list"), [dotted(variable)]), list(result.keys), where)
        for key, item in zip(result.keys, result.items, strict=True):
            code = access(dotted(variable), result.kind, key, self.expressions.constant(key, where))
            if isinstance(item, Ref):
                if self._variable(item) != "_":
                    yield assign(dotted(self._variable(item)), code)
            elif isinstance(item, Parts):
                yield from self._unpack(code, item, where)
            elif _is_checked(item):
                yield self._expect_result(code, item, where)

    def _matters(self, leaf: Any) -> bool:
        return self._variable(leaf) != "_" if isinstance(leaf, Ref) else _is_checked(leaf)

    def _variable(self, ref: Ref) -> str:
        found = self.expressions.variables.get(ref.value, "_")
        return found if found in self.read else "_"

    def _expect_result(self, found: ast.expr, recorded: Any, where: str) -> ast.stmt:
        return expect(found, self.expressions.constant(recorded, where), f"the result of {where}")


def _leaves(result: Parts) -> Iterator[Any]:
    for item in result.items:
        yield from _leaves(item) if isinstance(item, Parts) else (item,)


def _is_checked(leaf: Any) -> bool:
    """Whether a result that is not a tensor is compared with the recorded one."""
    return type(leaf) in (bool, int, float, str, type(None)) or isinstance(leaf, torch.dtype | enum.Enum)
