"""One stage of the file: the calls of the recording that it makes, and its class."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.overrides import resolve_name

from penstock.capture import Captured
from penstock.codegen.expressions import Expressions, dict_of
from penstock.codegen.formatting import INDENT, broken_lines, docstring_lines, statement_lines
from penstock.codegen.names import is_plain_path
from penstock.codegen.statements import Statement, StatementWriter, body_lines
from penstock.ir import Call, Guard, Node, Partition, Placement, counted, refs, states
from penstock.stages import Ownership


@dataclass(frozen=True)
class StageClass:
    """The class of one stage, and the values and state that it uses."""

    expressions: Expressions
    stage: int
    num_stages: int
    rank: int
    steps: Sequence[Call | Guard]
    """the calls of the stage whose results are used, and the guards whose values it has"""
    read: frozenset[str]
    """the values that its steps read, or that it returns"""
    receives: dict[str, int]
    """the values from other stages, with the stage that sends each"""
    sends: dict[str, tuple[int, ...]]
    """the values for other stages, with the stages that receive each"""
    parts: tuple[str, ...]
    """the parts of the model that it holds: blocks, and parameters and buffers outside of these"""
    num_rerun: int
    """the number of its nodes that belong to other stages: these depend on inputs only"""

    @property
    def name(self) -> str:
        """The name of the class."""
        return f"Stage{self.stage}"

    @property
    def is_last(self) -> bool:
        """Whether this stage returns the output of the model."""
        return self.stage == self.num_stages - 1

    @property
    def inputs(self) -> list[str]:
        """The inputs of the model that it needs."""
        return [name for name in self.expressions.recording.record.inputs if name in self.read]

    @property
    def parameters(self) -> list[str]:
        """The parameters of `forward`: inputs of the model, then values from other stages."""
        return self._variables((*self.inputs, *self.receives))

    @property
    def returned(self) -> list[str]:
        """The variables that `forward` returns, unless it is the last stage."""
        return self._variables(self.sends)

    def _variables(self, values: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self.expressions.variables[name] for name in values))

    def lines(self) -> list[str]:
        """The text of the class."""
        variables, recording = self.expressions.variables, self.expressions.recording
        takes = {}
        for value in (*self.inputs, *self.receives):
            spec = recording.graph.spec(value)
            # If the model read no size at all, any size is right.
            sizes = tuple(spec.shape) if recording.record.size_reads else (None,) * len(spec.shape)
            takes[variables[value]] = f"(torch.{spec.dtype}, {sizes!r})"
        tables = {
            "PARTS": repr(self.parts),
            "TAKES": dict_of(map(repr, takes), takes.values()),
            "RECEIVES": repr({variables[value]: stage for value, stage in self.receives.items()}),
            "SENDS": repr({variables[value]: stages for value, stages in self.sends.items()}),
        }
        return [
            f"class {self.name}(Stage):",
            *docstring_lines(self._description(), INDENT),
            "",
            *(line for name, table in tables.items() for line in statement_lines(f"{name} = {table}", INDENT)),
            "",
            *broken_lines(f"def forward({', '.join(('self', *self.parameters))}):", INDENT),
            *body_lines(self._statements(), 2 * INDENT),
        ]

    def _description(self) -> Iterator[str]:
        """The docstring: the values that cross, with their types and shapes."""
        graph = self.expressions.recording.graph

        def shown(value: str, origin: str) -> str:
            maker = graph.makers[value].name if value in graph.makers else ""
            made = f", made by {maker}" if maker and is_plain_path(maker) else ""
            return f"{self.expressions.variables[value]}, {graph.spec(value)}, {origin}{made}"

        yield f"Stage {self.stage} of {self.num_stages}, on rank {self.rank}."
        yield ""
        yield from (f"In: {shown(name, 'an input of the model')}" for name in self.inputs)
        yield from (f"In: {shown(name, f'from stage {stage}')}" for name, stage in self.receives.items())
        for name, stages in self.sends.items():
            readers = f"{'stages' if len(stages) > 1 else 'stage'} {', '.join(map(str, stages))}"
            yield f"Out: {shown(name, f'to {readers}')}"
        if self.is_last:
            yield "Out: the output of the model"
        if self.num_rerun:
            yield f"Rerun: {counted(self.num_rerun, 'call')} of other stages that depend on inputs only"

    def _statements(self) -> Iterator[Statement]:
        """The body of `forward`."""
        recording = self.expressions.recording
        graph, outputs = recording.graph, recording.record.outputs
        if self.parameters:
            yield Statement(f"self.check({', '.join(f'{name}={name}' for name in self.parameters)})")
        # Several stages may write into an input, and the caller's tensor must stay as it is.
        copied = [name for name in self.inputs if name in graph.written]
        yield from (Statement(f"{name} = {name}.clone()") for name in self._variables(copied))
        read = set(self._variables((*self.read, *self.sends)))
        yield from StatementWriter(self.expressions, read).steps(self.steps)
        # A value in the memory of a buffer is copied, as the next forward writes the buffer.
        leaving = refs(outputs) if self.is_last else self.sends
        copied = [name for name in leaving if name in recording.state_views and name in graph.makers]
        yield from (Statement(f"{name} = {name}.clone()") for name in self._variables(copied))
        output = self.expressions.expression(outputs, "the output of the model") if self.is_last else ""
        yield Statement(f"return {output or ', '.join(self.returned) or None}")


def stage_classes(
    captured: Captured, partition: Partition, placement: Placement, expressions: Expressions
) -> list[StageClass]:
    """The classes of all stages."""
    recording = expressions.recording
    graph, record = recording.graph, recording.record
    owners, crossings = Ownership(graph, partition), partition.crossings(graph)
    uncalled_blocks, unused_state = owners.by_stage(captured.uncalled_blocks()), owners.by_stage(owners.unused)
    model = captured.model
    held = {*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers(remove_duplicate=False))}
    found = []
    for stage, nodes in enumerate(partition.runs(graph)):
        outputs = record.outputs if stage == partition.num_stages - 1 else None
        sends: dict[str, tuple[int, ...]] = {}
        for crossing in crossings:
            for value in crossing.values if crossing.producer == stage else ():
                sends[value.name] = (*sends.get(value.name, ()), crossing.consumer)
        steps = _steps(expressions, nodes, {*sends, *refs(outputs)}, stage, owners)
        blocks = dict.fromkeys((*(node.module for node in nodes if node.is_block), *uncalled_blocks.get(stage, ())))
        state = [*(name for step in steps for name in step.arg_states), *states(outputs)]
        state += [buffer for step in steps if isinstance(step, Call) for _, buffer in step.results.updates]
        used = [name for node in nodes for name in (*node.parameters, *node.buffers)]
        # A plain tensor attribute that nothing reads was left behind by a forward, and is not part of the state.
        state += [name for name in (*used, *unused_state.get(stage, ())) if name in held]
        inside = tuple(f"{name}." for name in blocks)
        found.append(
            StageClass(
                expressions,
                stage,
                partition.num_stages,
                placement[stage],
                steps,
                read=frozenset((*(name for step in steps for name in step.reads), *refs(outputs))),
                receives={value.name: c.producer for c in crossings if c.consumer == stage for value in c.values},
                sends=sends,
                parts=(*blocks, *(name for name in dict.fromkeys(state) if not name.startswith(inside))),
                num_rerun=sum(node.name not in partition.stages[stage] for node in nodes),
            )
        )
    return found


def _steps(
    expressions: Expressions, nodes: Sequence[Node], needed: set[str], stage: int, owners: Ownership
) -> list[Call | Guard]:
    """The steps of a stage, without pure functions whose results nothing needs."""
    recording = expressions.recording
    names = {node.name for node in nodes}
    available = recording.available_values(names)
    writers = {update.node for update in recording.graph.updates}

    def belongs(step: Call | Guard) -> bool:
        if isinstance(step, Call):
            return step.name in names
        if step.reads:
            return available.issuperset(step.reads)
        # A guard of a buffer is checked by the stage that owns the buffer, one of a constant by the first stage.
        return (owners.of(step.arg_states[0]) if step.arg_states else 0) == stage

    def has_effect(step: Call | Guard) -> bool:
        if isinstance(step, Guard) or step.is_module or step.writes or step.results.updates:
            return True
        # Functions outside of torch may do anything, so they are kept.
        is_torch_function = resolve_name(recording.live[step.target]) is not None
        return not is_torch_function or recording.graph[step.name].is_random or step.name in writers

    kept: list[Call | Guard] = []
    for step in reversed([step for step in recording.record.steps if belongs(step)]):
        if has_effect(step) or needed & set(step.results.values):
            needed.update(step.reads)
            kept.append(step)
    return kept[::-1]
