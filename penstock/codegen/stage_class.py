"""One stage of the file: the calls of the recording that it makes, and its class."""

import ast
from collections.abc import Iterable, Iterator, Sequence

from torch.overrides import resolve_name

from penstock.capture import Captured
from penstock.codegen.expressions import Expressions, dict_of
from penstock.codegen.formatting import INDENT, broken_lines, docstring_lines, statement_lines
from penstock.codegen.names import is_plain_path
from penstock.codegen.statements import Statement, StatementWriter, body_lines
from penstock.ir import Call, Guard, Node, Partition, Placement, counted, refs, states
from penstock.stages import Ownership


class StageClass:
    """The class of one stage, and the values and state that it uses."""

    def __init__(
        self, captured: Captured, partition: Partition, placement: Placement, expressions: Expressions, stage: int
    ) -> None:
        graph, record, model = expressions.recording.graph, expressions.recording.record, captured.model
        owners, crossings = Ownership(graph, partition), partition.crossings(graph)
        nodes = partition.runs(graph)[stage]
        self._expressions, self._stage, self._num_stages = expressions, stage, partition.num_stages
        self.rank = placement[stage]
        self.name = f"Stage{stage}"
        self.is_last = stage == partition.num_stages - 1
        self._outputs = record.outputs if self.is_last else None
        self._receives = {value.name: c.producer for c in crossings if c.consumer == stage for value in c.values}
        """the values from other stages, with the stage that sends each"""
        sent = [(value.name, c.consumer) for c in crossings if c.producer == stage for value in c.values]
        self._sends = {name: tuple(reader for value, reader in sent if value == name) for name, _ in sent}
        """the values for other stages, with the stages that receive each"""
        self._steps = self._needed_steps(nodes, owners)
        """the calls of the stage whose results are used, and the guards whose values it has"""
        read = {*(name for step in self._steps for name in step.reads), *refs(self._outputs), *self._sends}
        used = set(self._variables(read))
        self._read = {name: variable for name, variable in expressions.variables.items() if variable in used}
        """the values whose variables are read, also after a write in place, with these variables"""
        self.inputs = [name for name in record.inputs if name in read]
        """the inputs of the model that it needs"""
        self.parameters = self._variables((*self.inputs, *self._receives))
        """the parameters of `forward`: inputs of the model, then values from other stages"""
        self.returned = self._variables(self._sends)
        """the variables that `forward` returns, unless it is the last stage"""
        self._num_rerun = sum(node.name not in partition.stages[stage] for node in nodes)
        """the number of its nodes that belong to other stages: these depend on inputs only"""
        held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        # Parts that the example did not use are in a stage too.
        uncalled = filter(owners.is_within_one_stage, captured.uncalled_blocks())
        unused = [*uncalled, *(name for name in owners.unused if name in held)]
        blocks = [node.module for node in nodes if node.is_block]
        blocks += [name for name in unused if owners.of(name) == stage]
        state = [*(name for step in self._steps for name in step.arg_states), *states(self._outputs)]
        state += [buffer for step in self._steps if isinstance(step, Call) for _, buffer in step.results.updates]
        # A plain tensor attribute that nothing reads was left behind by a forward, and is not part of the state.
        state += [name for node in nodes for name in (*node.parameters, *node.buffers) if name in held]
        inside = tuple(f"{name}." for name in blocks)
        self._parts = tuple(name for name in dict.fromkeys((*blocks, *state)) if not name.startswith(inside))
        """the parts of the model that it holds: blocks, and parameters and buffers outside of these"""

    def _variables(self, values: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self._expressions.variables[name] for name in values))

    def _needed_steps(self, nodes: Sequence[Node], owners: Ownership) -> list[Call | Guard]:
        """The steps of the nodes, without pure functions whose results nothing needs."""
        recording, graph = self._expressions.recording, self._expressions.recording.graph
        writers = {update.node for update in graph.updates}
        needed = {*self._sends, *refs(self._outputs)}
        kept: list[Call | Guard] = []
        for step in reversed(recording.steps_of([node.name for node in nodes])):
            if isinstance(step, Guard):
                # A guard of a buffer is checked by the stage that owns the buffer, one of a constant by the first one.
                is_kept = bool(step.reads) or (owners.of(step.arg_states[0]) if step.arg_states else 0) == self._stage
            else:
                is_write = step.writes or step.results.updates or step.name in writers
                # Functions outside of torch may do anything, so they are kept.
                is_known = not step.is_module and resolve_name(recording.live[step.target]) is not None
                has_effect = is_write or not is_known or graph[step.name].is_random
                is_kept = has_effect or not needed.isdisjoint(step.results.values)
            if is_kept:
                needed.update(step.reads)
                kept.append(step)
        return kept[::-1]

    def lines(self) -> list[str]:
        variables, recording = self._expressions.variables, self._expressions.recording
        takes = {}
        for value in (*self.inputs, *self._receives):
            spec = recording.graph.spec(value)
            # If the model read no size at all, any size is right.
            sizes = tuple(spec.shape) if recording.size_reads else (None,) * len(spec.shape)
            takes[variables[value]] = f"(torch.{spec.dtype}, {sizes!r})"
        tables = {
            "PARTS": repr(self._parts),
            "TAKES": dict_of(map(repr, takes), takes.values()),
            "RECEIVES": repr({variables[value]: stage for value, stage in self._receives.items()}),
            "SENDS": repr({variables[value]: stages for value, stages in self._sends.items()}),
        }
        signature = f"forward({', '.join(('self', *self.parameters))})"
        return [
            f"class {self.name}(Stage):",
            *docstring_lines(self._description(), INDENT),
            "",
            *(line for name, table in tables.items() for line in statement_lines(f"{name} = {table}", INDENT)),
            "",
            *broken_lines(f"def {signature}:", ast.parse(signature), INDENT),
            *body_lines(self._statements(), 2 * INDENT),
        ]

    def _description(self) -> Iterator[str]:
        """The docstring: the values that cross, with their types and shapes."""
        graph = self._expressions.recording.graph

        def shown(value: str, origin: str) -> str:
            maker = graph.makers[value].name if value in graph.makers else ""
            made = f", made by {maker}" if maker and is_plain_path(maker) else ""
            return f"{self._expressions.variables[value]}, {graph.spec(value)}, {origin}{made}"

        yield f"Stage {self._stage} of {self._num_stages}, on rank {self.rank}."
        yield ""
        yield from (f"In: {shown(name, 'an input of the model')}" for name in self.inputs)
        yield from (f"In: {shown(name, f'from stage {stage}')}" for name, stage in self._receives.items())
        for name, stages in self._sends.items():
            readers = f"{'stages' if len(stages) > 1 else 'stage'} {', '.join(map(str, stages))}"
            yield f"Out: {shown(name, f'to {readers}')}"
        if self.is_last:
            yield "Out: the output of the model"
        if self._num_rerun:
            yield f"Rerun: {counted(self._num_rerun, 'call')} of other stages that depend on inputs only"

    def _statements(self) -> Iterator[Statement]:
        recording = self._expressions.recording
        graph = recording.graph
        if self.parameters:
            yield Statement(f"self.check({', '.join(f'{name}={name}' for name in self.parameters)})")
        # Several stages may write into an input, and the caller's tensor must stay as it is.
        copied = [name for name in self.inputs if name in graph.written]
        yield from (Statement(f"{name} = {name}.clone()") for name in self._variables(copied))
        yield from StatementWriter(self._expressions, self._read).steps(self._steps)
        # A value in the memory of a buffer is copied, as the next forward writes the buffer.
        views = recording.state_views & graph.makers.keys()
        copied = [name for name in (*self._sends, *refs(self._outputs)) if name in views]
        yield from (Statement(f"{name} = {name}.clone()") for name in self._variables(copied))
        output = self._expressions.expression(self._outputs, "the output of the model") if self.is_last else ""
        yield Statement(f"return {output or ', '.join(self.returned) or None}")
