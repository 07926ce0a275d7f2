"""The part of a recording that belongs to one stage: its steps, and the values that enter and leave it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.overrides import resolve_name

from penstock.capture import Captured, Recording
from penstock.ir import Call, Guard, Node, Partition, refs, states
from penstock.stages import Ownership


@dataclass(frozen=True)
class Section:
    """The calls of one stage of a captured model, and the values and state that they use."""

    recording: Recording
    stage: int
    num_stages: int
    steps: tuple[Call | Guard, ...]
    """the calls of the stage whose results are used, and the guards whose values it has"""
    read: frozenset[str]
    """the values that its steps read, or that it returns"""
    receives: dict[str, int]
    """the values from other stages, with the stage that sends each"""
    sends: dict[str, tuple[int, ...]]
    """the values for other stages, with the stages that receive each"""
    blocks: tuple[str, ...]
    """the modules that it holds whole, including those that the example never called"""
    parts: tuple[str, ...]
    """the parts of the model that it holds: `blocks`, and parameters and buffers outside of these"""
    num_rerun: int
    """the number of its nodes that belong to other stages: these depend on inputs only"""

    @property
    def is_last(self) -> bool:
        """Whether this stage returns the output of the model."""
        return self.stage == self.num_stages - 1

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of the model that it needs."""
        return tuple(name for name in self.recording.record.inputs if name in self.read)


def sections(captured: Captured, recording: Recording, partition: Partition) -> list[Section]:
    """The sections of all stages."""
    graph, record = recording.graph, recording.record
    owners, crossings = Ownership(graph, partition), partition.crossings(graph)
    uncalled_blocks, unused_state = owners.by_stage(captured.uncalled_blocks()), owners.by_stage(owners.unused)
    found = []
    for stage, nodes in enumerate(partition.runs(graph)):
        outputs = record.outputs if stage == partition.num_stages - 1 else None
        sends: dict[str, tuple[int, ...]] = {}
        for crossing in crossings:
            for value in crossing.values if crossing.producer == stage else ():
                sends[value.name] = (*sends.get(value.name, ()), crossing.consumer)
        steps = _steps(recording, nodes, {*sends, *refs(outputs)}, stage, owners)
        called = captured.block_modules((node.name for node in nodes), recording)
        blocks = dict.fromkeys((*called, *uncalled_blocks.get(stage, ())))

        state = [name for step in steps for name in _step_states(step)] + list(states(outputs))
        used = [name for node in nodes for name in (*node.parameters, *node.buffers)]
        for name in (*used, *unused_state.get(stage, ())):
            # A plain tensor attribute that nothing reads was left behind by a forward, and is not part of the state.
            path, _, attribute = name.rpartition(".")
            owner = captured.model.get_submodule(path)
            if attribute in owner._parameters or attribute in owner._buffers:
                state.append(name)
        inside = tuple(f"{name}." for name in blocks)
        section = Section(
            recording,
            stage,
            partition.num_stages,
            steps=tuple(steps),
            read=frozenset((*(name for step in steps for name in step.reads), *refs(outputs))),
            receives={value.name: c.producer for c in crossings if c.consumer == stage for value in c.values},
            sends=sends,
            blocks=tuple(blocks),
            parts=(*blocks, *(name for name in dict.fromkeys(state) if not name.startswith(inside))),
            num_rerun=sum(node.name not in partition.stages[stage] for node in nodes),
        )
        found.append(section)
    return found


def _steps(
    recording: Recording, nodes: Sequence[Node], needed: set[str], stage: int, owners: Ownership
) -> list[Call | Guard]:
    """The steps of a stage, without pure functions whose results nothing needs."""
    graph = recording.graph
    names = {node.name for node in nodes}
    available = recording.available_values(names)
    writers = {update.node for update in graph.updates}

    def belongs(step: Call | Guard) -> bool:
        if isinstance(step, Call):
            return step.name in names
        if step.reads:
            return available.issuperset(step.reads)
        # A guard of a buffer is checked by the stage that owns the buffer, one of a constant by the first stage.
        buffers = _step_states(step)
        return (owners.of(buffers[0]) if buffers else 0) == stage

    def has_effect(step: Call | Guard) -> bool:
        if isinstance(step, Guard) or step.is_module or step.writes or step.results.updates:
            return True
        # Functions outside of torch may do anything, so they are kept.
        is_torch_function = resolve_name(recording.live[step.target]) is not None
        return not is_torch_function or graph[step.name].is_random or step.name in writers

    kept: list[Call | Guard] = []
    for step in reversed([step for step in recording.record.steps if belongs(step)]):
        if has_effect(step) or needed & set(step.results.values):
            needed.update(step.reads)
            kept.append(step)
    return kept[::-1]


def _step_states(step: Call | Guard) -> tuple[str, ...]:
    updated = tuple(buffer for _, buffer in step.results.updates) if isinstance(step, Call) else ()
    return (*step.arg_states, *updated)
