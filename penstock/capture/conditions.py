"""Conditions: what the inputs of a batch must decide for a recording to hold for it."""

from torch import nn

from penstock.capture.hooks import silent_hooks
from penstock.capture.recording import Recording
from penstock.capture.replay import Replay, Values
from penstock.capture.structure import TENSOR
from penstock.ir import Call, Guard, refs


class Conditions:
    """All that a record read from the inputs, and from what depends on them alone, prepared to be read again."""

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self._written = recording.graph.written
        nodes = _needed(recording)
        self._replay = None if nodes is None else Replay(recording, nodes, model, ())
        chosen = [recording.graph[name] for name in nodes or ()]
        self._leaves = [model.get_submodule(node.module) for node in chosen if node.is_leaf]

    @property
    def are_trivial(self) -> bool:
        """Whether every batch of the form meets them."""
        return self._replay is None

    def hold(self, inputs: Values) -> bool:
        """Whether all reads the same in this batch."""
        if self._replay is None:
            return True
        own = {name: leaf.clone() if name in self._written else leaf for name, leaf in inputs.items()}
        try:
            with silent_hooks(self._leaves):
                self._replay.run(own)
        except Exception:
            # What cannot be computed for this batch is told when the model itself is run on it.
            return False
        return True


def _needed(recording: Recording) -> list[str] | None:
    """The nodes that must run to read everything again; None if there is nothing to read."""
    graph = recording.graph
    free = {node.name for node in graph.nodes if node.from_inputs}
    here = recording.at_hand(free)
    read: set[str] = set()
    is_any = False
    varying = set(recording.record.inputs)
    for step in recording.record.steps:
        if isinstance(step, Guard):
            names = {*refs(step.args), *refs(step.kwargs)}
            if names <= here:
                is_any, read = True, read | names
        elif step.name in free and (graph[step.name].buffers or varying & set(graph[step.name].reads)):
            varying |= {value.name for value in graph[step.name].makes}
            if _may_vary(step, recording.record.sized):
                is_any, read = True, read | {value.name for value in graph[step.name].makes}
    return _makers(recording, read) if is_any else None


def _may_vary(call: Call, sized: frozenset[str]) -> bool:
    """Whether the model goes by the form of what a call returned."""
    names = call.results.values
    return call.results.structure != TENSOR or not sized.isdisjoint(names)


def _makers(recording: Recording, values: set[str]) -> list[str]:
    """The nodes that make some values, and all that these need, in the order of the graph."""
    needed: list[str] = []
    wanted = set(values)
    for node in reversed(recording.graph.nodes):
        if wanted & {value.name for value in node.makes}:
            needed.append(node.name)
            wanted |= set(node.reads)
    return needed[::-1]
