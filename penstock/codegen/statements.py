"""The calls and guards of one stage as Python statements, with comments on shapes and modules."""

import ast
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.codegen.expressions import Expressions, tuple_of
from penstock.codegen.formatting import INDENT, WIDTH, statement_lines
from penstock.codegen.names import is_plain_path
from penstock.ir import TENSOR, Call, CallContext, Guard, ObjectRef, Parts, Ref, State

_MAX_NUMBERS = 64
"""most entries of an array in a guard that is written into the code"""
# fmt: off
_SHAPE_FOLLOWS = {
    "add", "addmm", "baddbmm", "bmm", "cat", "clone", "contiguous", "conv1d", "conv2d", "cos", "cumsum", "div",
    "dropout", "embedding", "empty_like", "expand", "flatten", "float", "gelu", "layer_norm", "linear", "matmul",
    "mean", "mul", "neg", "permute", "pow", "relu", "repeat", "reshape", "rsqrt", "scaled_dot_product_attention",
    "sigmoid", "silu", "sin", "softmax", "split", "squeeze", "stack", "sub", "tanh", "to", "transpose", "unsqueeze",
    "view", "zeros_like",
}
# fmt: on
"""functions whose result has a shape that follows from the shapes of the arguments, so that it needs no check"""
_NO_CONTEXT = CallContext()


class Statement(NamedTuple):
    """A statement or a comment, the context that it runs in, and a comment beside it."""

    code: str
    context: CallContext = _NO_CONTEXT
    comment: str = ""


def body_lines(statements: Iterable[Statement], indent: str) -> list[str]:
    """The lines of statements; consecutive ones of one context share a `with`."""
    found: list[str] = []
    for context, group in groupby(statements, key=lambda statement: statement.context):
        inner = indent
        if context != _NO_CONTEXT:
            managers = {None: [], True: ["torch.enable_grad()"], False: ["torch.no_grad()"]}[context.grad]
            for device, is_enabled, dtype in context.autocast:
                enabled = "" if is_enabled else ", enabled=False"
                managers.append(f'torch.autocast("{torch.device(device)}", dtype={dtype}{enabled})')
            found.append(f"{indent}with {', '.join(managers)}:")
            inner += INDENT
        for statement in group:
            is_comment = statement.code.startswith("#")
            lines = [inner + statement.code] if is_comment else statement_lines(statement.code, inner)
            beside = f"{lines[-1]}  # {statement.comment}"
            found += [*lines[:-1], beside if statement.comment and len(beside) <= WIDTH else lines[-1]]
    return found


def expect(found: str, recorded: str, what: str) -> str:
    """A call of `expect` of the generated file: raises if a value differs from the recorded one."""
    return f"expect({found}, {recorded}, {what!r})"


def is_plain(leaf: Any) -> bool:
    """Whether a result that is not a tensor is compared with the recorded one."""
    return type(leaf) in (bool, int, float, str, type(None)) or isinstance(leaf, torch.dtype | enum.Enum)


@dataclass(frozen=True)
class StatementWriter:
    """Writes the statements of one function of the file."""

    expressions: Expressions
    variables: Mapping[str, str]
    """the variables of values that are read, in this stage or by the stages that it sends to"""
    is_checked: Callable[[Any], bool] = is_plain
    """whether a value that is not a tensor must be the recorded one"""

    def steps(self, steps: Iterable[Call | Guard]) -> Iterator[Statement]:
        """The calls and guards of a stage, with a comment above where the forward of another module begins."""
        scope, context = "", _NO_CONTEXT
        for step in steps:
            if isinstance(step, Guard):
                yield Statement(self._guard(step), context)
                continue
            context, node = step.context, self.expressions.recording.graph[step.name]
            if not node.is_block and node.module != scope:
                scope = node.module
                if not scope or is_plain_path(scope):
                    yield Statement(f"# in {scope or 'the model itself'}", context)
            yield from self._call(step)

    def _guard(self, guard: Guard) -> str:
        """A Python value that the model read from a tensor and that must be the same again."""
        live, where = self.expressions.recording.live, f"{guard.scope or 'the model'}, {guard.name}"
        found = self.expressions.function_call(live[guard.target], guard.args, guard.kwargs, where)
        expected = live[guard.expected].value
        if not isinstance(expected, np.ndarray):
            return expect(found, self.expressions.expression(expected, where), where)
        # Large arrays are in the file of constants.
        is_small = expected.size <= _MAX_NUMBERS
        recorded = self.expressions.expression(expected.tolist() if is_small else torch.tensor(expected), where)
        return expect(f"({found}).tolist()", recorded if is_small else f"{recorded}.tolist()", where)

    def _call(self, step: Call) -> Iterator[Statement]:
        """The call, the statements that unpack its result, and checks of sizes that the model read."""
        expressions, recording, graph = self.expressions, self.expressions.recording, self.expressions.recording.graph
        node = graph[step.name]
        new = [value for value in dict.fromkeys(step.results.values) if graph.makers.get(value) is node]
        comment = ", ".join(str(graph.spec(value)) for value in new)
        for code in self._call_and_unpack(step):
            yield Statement(code, step.context, comment)
            comment = ""
        for value, buffer in step.results.updates:
            code = f"{expressions.variables[value]} = {expressions.part(buffer)}"
            if value in recording.state_views:
                yield Statement(code, step.context)
                continue
            # The next forward writes the buffer again, so the value is a copy. Even after a call without gradients
            # the buffer may be part of a graph.
            yield Statement(f"{code}.clone()", CallContext(grad=True) if step.context.grad is False else _NO_CONTEXT)
        for value in new if node.is_block or node.kind not in _SHAPE_FOLLOWS else ():
            if value in recording.size_reads:
                name, shape = expressions.variables[value], tuple(graph.spec(value).shape)
                yield Statement(expect(f"tuple({name}.shape)", repr(shape), f"the size of {name}"), step.context)

    def _call_and_unpack(self, step: Call) -> Iterator[str]:
        expressions, recording, where = self.expressions, self.expressions.recording, step.name
        args, kwargs = step.args, step.kwargs
        if step.changes_arguments:
            # The code reads the arguments after the call, as part of the result.
            target = State(step.target) if step.is_module else ObjectRef(step.target)
            parts = [expressions.expression(part, where) for part in (target, args, kwargs)]
            code = f"with_arguments({', '.join(parts)})"
        elif step.is_module:
            code = expressions.call(expressions.part(step.target), args.items, kwargs, where)
        else:
            code = expressions.function_call(recording.live[step.target], args, kwargs, where)
        if not isinstance(ast.parse(code).body[0], ast.Expr):
            yield code
            return
        result = Ref(step.results.values[0]) if step.results.structure == TENSOR else recording.returned[where]
        updated = {expressions.variables[new] for new, _ in step.results.updates}
        if result is None or (isinstance(result, Ref) and self.variables.get(result.value) in updated):
            yield code
        else:
            yield from list(self.unpack(code, result, f"the result of {where}")) or [code]

    def unpack(self, code: str, result: Any, what: str) -> Iterator[str]:
        """Assign the tensors in the result of `code` to their variables, and check everything else.

        The result is given as it was recorded: containers as Parts, tensors as Refs. `what` names it in errors.
        """
        if isinstance(result, Ref):
            if result.value in self.variables:
                yield f"{self.variables[result.value]} = {code}"
        elif not isinstance(result, Parts):
            if self.is_checked(result):
                yield expect(code, self.expressions.expression(result, what), what)
        elif issubclass(result.kind, list | tuple) and result.items:
            later: list[tuple[str, Any]] = []
            yield f"{tuple_of(self._target(item, later) for item in result.items)} = {code}"
            for variable, inner in later:
                yield from self.unpack(variable, inner, what)
        else:
            if "(" in code:
                whole = self.expressions.names.fresh("result")
                yield f"{whole} = {code}"
                code = whole
            if issubclass(result.kind, list | tuple):
                yield expect(f"len({code})", "0", f"the length of {what}")
            if issubclass(result.kind, Mapping):
                keys = self.expressions.expression(list(result.keys), what)
                yield expect(f"list({code})", keys, f"the keys of {what}")
            for key, item in zip(result.keys, result.items, strict=True):
                part = self.expressions.access(code, result.kind, key, what)
                yield from self.unpack(part, item, f"{what}.{key}")

    def _target(self, item: Any, later: list[tuple[str, Any]]) -> str:
        """The target of an item in an assignment; one that must still be checked or unpacked is added to `later`."""
        if isinstance(item, Ref):
            return self.variables.get(item.value, "_")
        if isinstance(item, Parts) and issubclass(item.kind, list | tuple) and item.items:
            return tuple_of(self._target(inner, later) for inner in item.items)
        if not isinstance(item, Parts) and not self.is_checked(item):
            return "_"
        later.append((self.expressions.names.fresh("none" if item is None else "part"), item))
        return later[-1][0]
