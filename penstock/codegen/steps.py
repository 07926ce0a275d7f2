"""Steps: the calls and decisions of one stage as statements, in the moods in which the model made them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np

from penstock.codegen.answers import Answers
from penstock.codegen.calls import function_call, module_call
from penstock.codegen.layout import Chain, Code, call, quoted
from penstock.codegen.names import Names, is_plain_path, part_code
from penstock.codegen.statements import Statement
from penstock.codegen.terms import Terms
from penstock.errors import CodeError
from penstock.ir import Call, CallContext, Graph, Guard

_TENSOR = "*"
_MOST_NUMBERS = 64
# fmt: off
_CERTAIN = frozenset(
    {
        "add", "addmm", "baddbmm", "bmm", "cat", "clone", "contiguous", "conv1d", "conv2d", "cos", "cumsum", "div",
        "dropout", "embedding", "empty_like", "expand", "flatten", "float", "gelu", "layer_norm", "linear", "matmul",
        "mean", "mul", "neg", "permute", "pow", "relu", "repeat", "reshape", "rsqrt", "scaled_dot_product_attention",
        "sigmoid", "silu", "sin", "softmax", "split", "squeeze", "stack", "sub", "tanh", "to", "transpose", "unsqueeze",
        "view", "zeros_like",
    }
)
# fmt: on
"""functions of which no number decides the size of a result"""


@dataclass(frozen=True)
class Steps:
    """Writes the steps of one stage."""

    terms: Terms
    names: Names
    read: Collection[str]
    """the variables that are read, in this stage or by those that it sends to"""

    @property
    def _graph(self) -> Graph:
        return self.terms.recording.graph  # type: ignore[no-any-return]

    def statements(self, steps: Collection[Call | Guard]) -> Iterator[Statement]:
        """All statements, with a heading wherever another module's forward begins."""
        scope, context = "", CallContext()
        for step in steps:
            if isinstance(step, Guard):
                yield replace(self._guard(step), context=context)
                continue
            context = step.context
            node = self._graph[step.name]
            is_new = not node.is_leaf and node.module != scope
            scope = scope if node.is_leaf else node.module
            heading = self._heading(scope) if is_new else ""
            for statement in self._call(step):
                yield replace(statement, heading=heading)
                heading = ""

    def _heading(self, scope: str) -> str:
        """The module in whose forward the model is."""
        return f"in {scope}" if is_plain_path(scope) else "in the model itself" if not scope else ""

    def _guard(self, guard: Guard) -> Statement:
        live, where = self.terms.recording.live, f"{guard.scope or 'the model'}, {guard.name}"
        found = function_call(self.terms, live[guard.target], guard.args, guard.kwargs, where).code
        expected = live[guard.expected].value
        if isinstance(expected, np.ndarray):
            if expected.size > _MOST_NUMBERS:
                raise CodeError(
                    "the model decides by too many numbers to write them down",
                    where=where,
                    numbers=expected.size,
                    hint="keep the module that decides whole (basic_blocks)",
                )
            found, expected = Chain((found, ".tolist()")), expected.tolist()
        return Statement(call("expect", [found, self.terms.constant(expected, where), quoted(where)]))

    def _call(self, step: Call) -> Iterator[Statement]:
        updated = {self.terms.variables[value] for value, _ in step.results.updates}
        first, *rest = self._statements(step, updated)
        yield Statement(first, step.context, self._remark(step))
        for code in rest:
            yield Statement(code, step.context)
        for value, buffer in step.results.updates:
            yield self._update(value, buffer, step.context)
        for value in () if self._is_certain(step) else self._made(step):
            if value in self.terms.recording.record.sized:
                yield replace(self._size(value), context=step.context)

    def _statements(self, step: Call, updated: set[str]) -> list[Code]:
        """The call and what takes its result apart."""
        if step.is_module:
            module = part_code(step.target, self.terms.leaves)
            code = module_call(self.terms, module, step.args, step.kwargs, step.name)
        else:
            function = self.terms.recording.live[step.target]
            written = function_call(self.terms, function, step.args, step.kwargs, step.name)
            if written.is_statement:
                return [written.code]
            code = written.code
        if step.results.structure != _TENSOR:
            answers = Answers(self.terms, self.names, self.read)
            return list(answers.statements(code, self.terms.recording.returned[step.name], step.name))
        variable = self.terms.variables.get(step.results.values[0])
        is_bound = variable in self.read and variable not in updated
        return [Chain((variable, " = ", code)) if is_bound and variable else code]

    def _update(self, value: str, buffer: str, context: CallContext) -> Statement:
        """A buffer as the call left it: a copy, as the next forward writes it again, unless values look into it."""
        code, variable = part_code(buffer, self.terms.leaves), self.terms.variables[value]
        if value in self.terms.recording.state_views:
            return Statement(Chain((variable, " = ", code)), context)
        # Also where the call ran without gradients, the buffer may be part of a graph.
        return Statement(
            Chain((variable, " = ", code, ".clone()")),
            CallContext(grad=True) if context.grad is False else CallContext(),
        )

    def _size(self, value: str) -> Statement:
        variable = self.terms.variables[value]
        sizes = repr(tuple(self._graph.spec(value).shape))
        return Statement(call("expect", [f"tuple({variable}.shape)", sizes, quoted(f"the size of {variable}")]))

    def _is_certain(self, step: Call) -> bool:
        """Whether the size of what a call makes follows from the sizes of what it is given, which were checked."""
        node = self._graph[step.name]
        return not node.is_leaf and node.kind in _CERTAIN

    def _remark(self, step: Call) -> str:
        """The types and sizes of what a call makes."""
        return ", ".join(str(self._graph.spec(value)) for value in self._made(step))

    def _made(self, step: Call) -> list[str]:
        """What a call returns that was not there before."""
        makers = self._graph.makers
        return [
            name for name in dict.fromkeys(step.results.values) if name in makers and makers[name].name == step.name
        ]
