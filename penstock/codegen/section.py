"""The part of a recording that belongs to one stage: its steps, and the values that enter and leave it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from torch.overrides import resolve_name

from penstock.ir import Call, Crossing, Graph, Guard, Node, Partition, refs, states
from penstock.stages import Ownership


@dataclass(frozen=True)
class Section:
    """One stage of a captured model."""

    captured: Any
    recording: Any
    partition: Partition
    stage: int
    nodes: tuple[Node, ...]
    """the nodes that the stage runs"""
    crossings: tuple[Crossing, ...]
    """of all stages"""

    @property
    def _graph(self) -> Graph:
        return self.recording.graph  # type: ignore[no-any-return]

    @property
    def is_last(self) -> bool:
        """Whether this stage returns the output of the model."""
        return self.stage == self.partition.num_stages - 1

    @cached_property
    def steps(self) -> tuple[Call | Guard, ...]:
        """The calls of the stage whose results are used, and the guards whose values it has."""
        names = {node.name for node in self.nodes}
        here = self.recording.available_values(names)
        own = [step for step in self.recording.record.steps if self._belongs(step, names, here)]
        read, kept = {*self.sends, *(self._graph.outputs if self.is_last else ())}, []
        for step in reversed(own):
            if self._has_effect(step) or read & set(step.results.values):
                read.update(_step_refs(step))
                kept.append(step)
        return tuple(reversed(kept))

    def _has_effect(self, step: Call | Guard) -> bool:
        """Whether a step must run even if nothing reads its result; pure functions of torch need not."""
        if isinstance(step, Guard) or step.is_module or step.writes or step.results.updates:
            return True
        is_known = resolve_name(self.recording.live[step.target]) is not None
        return not is_known or self._graph[step.name].is_random or step.name in self._writers

    @cached_property
    def _writers(self) -> set[str]:
        return {update.node for update in self._graph.updates}

    def _belongs(self, step: Call | Guard, names: set[str], here: set[str]) -> bool:
        if isinstance(step, Call):
            return step.name in names
        read = set(_step_refs(step))
        if read:
            return read <= here
        looked_at = _step_states(step)
        return (self._owners.of(looked_at[0]) if looked_at else 0) == self.stage

    @cached_property
    def _owners(self) -> Ownership:
        return Ownership(self._graph, self.partition)

    @cached_property
    def mentioned(self) -> tuple[str, ...]:
        """The values that its steps read, or that it returns."""
        outputs = refs(self.recording.record.outputs) if self.is_last else ()
        return tuple(dict.fromkeys((*(name for step in self.steps for name in _step_refs(step)), *outputs)))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The inputs of the model that it needs."""
        return tuple(name for name in self.recording.record.inputs if name in self.mentioned)

    @cached_property
    def receives(self) -> dict[str, int]:
        """The values from other stages, with the stage that sends each."""
        return {value.name: c.producer for c in self.crossings if c.consumer == self.stage for value in c.values}

    @cached_property
    def sends(self) -> dict[str, tuple[int, ...]]:
        """The values for other stages, with the stages that receive each."""
        found: dict[str, tuple[int, ...]] = {}
        for crossing in self.crossings:
            if crossing.producer == self.stage:
                for value in crossing.values:
                    found[value.name] = (*found.get(value.name, ()), crossing.consumer)
        return found

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        """The modules that it holds whole, including those that the example never called."""
        called = self.captured.leaf_modules((node.name for node in self.nodes), self.recording)
        unused = self._owners.unused_of(self.stage, self.captured.unused_leaves())
        return tuple(dict.fromkeys((*called, *unused)))

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The parts of the model that it holds: modules, and parameters and buffers outside of these."""
        inside = tuple(f"{name}." for name in self.leaves)
        others = (name for name in dict.fromkeys(self._state()) if not name.startswith(inside))
        return (*self.leaves, *others)

    def _state(self) -> Iterator[str]:
        for step in self.steps:
            yield from _step_states(step)
        if self.is_last:
            yield from states(self.recording.record.outputs)
        used = [name for node in self.nodes for name in (*node.parameters, *node.buffers)]
        # A plain tensor attribute that nothing reads was left behind by a forward, and is not part of the state.
        owned = (*used, *self._owners.unused_of(self.stage, self._owners.unused))
        yield from (name for name in owned if _is_registered(self.captured.model, name))

    @property
    def rerun(self) -> int:
        """The number of its calls that belong to other stages: these depend on inputs only."""
        return sum(node.name not in self.partition.stages[self.stage] for node in self.nodes)


def sections(captured: Any, recording: Any, partition: Partition) -> tuple[Section, ...]:
    """The sections of all stages."""
    crossings = partition.crossings(recording.graph)
    runs = enumerate(partition.runs(recording.graph))
    return tuple(Section(captured, recording, partition, stage, nodes, crossings) for stage, nodes in runs)


def _is_registered(model: nn.Module, name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    return attribute in owner._parameters or attribute in owner._buffers


def _step_refs(step: Call | Guard) -> tuple[str, ...]:
    # A value that is written in place has another name afterwards, but must exist before.
    written = tuple(old for _, old in step.writes) if isinstance(step, Call) else ()
    return (*refs(step.args), *refs(step.kwargs), *written)


def _step_states(step: Call | Guard) -> tuple[str, ...]:
    updated = tuple(buffer for _, buffer in step.results.updates) if isinstance(step, Call) else ()
    return (*states(step.args), *states(step.kwargs), *updated)
