"""Stage: the part of a model that one rank runs, a module with the original names."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import nn

from penstock.ir import Graph, Partition
from penstock.stages.decisions import check_guards
from penstock.stages.deferred import Deferred
from penstock.stages.memory import check_memory
from penstock.stages.origin import Origin
from penstock.stages.ownership import Ownership
from penstock.stages.recompute import Recompute
from penstock.stages.release import Release
from penstock.stages.skeleton import fill

Values = dict[str, Any]


class Source(Protocol):
    """What a stage asks of a captured model: to prepare some calls of a recording."""

    model: nn.Module

    @property
    def graph(self) -> Graph: ...

    def leaf_modules(self, nodes: Iterable[str], recording: Any = None) -> list[str]: ...

    def unused_leaves(self) -> list[str]: ...

    def replay(self, recording: Any, nodes: Any, modules: nn.Module, wanted: Any, wrap: Any = None) -> Any: ...


class Stage(nn.Module):
    """One stage of a partition. Its parts are the model's own modules; its state dict has the model's keys.

    `forward(recording, inputs, incoming)` takes the inputs of the model and the values that cross to this stage, by
    name, and returns the values that leave it. It holds no schedule and no microbatch: those are in a StageRun.

    If it `recomputes`, each block keeps only what it was given until backward, where it runs once more; hooks on it
    are then called twice.
    """

    def __init__(self, source: Source, partition: Partition, index: int, recomputes: bool = False) -> None:
        super().__init__()
        self.stage_index, self.recomputes = index, recomputes
        self._source = (source,)  # in a tuple, so that the whole model is no part of this module
        self._partition = partition
        self._prepared: dict[tuple[int, bool], tuple[Any, Any]] = {}
        self._release = Release()
        graph = source.graph
        check_memory(source.model, graph, partition)
        nodes = partition.runs(graph)[index]
        leaves = source.leaf_modules(node.name for node in nodes)
        state = [name for node in nodes for name in (*node.parameters, *node.buffers)]
        owners = Ownership(graph, partition)
        leaves += owners.unused_of(index, source.unused_leaves())
        state += owners.unused_of(index, owners.unused)
        fill(self, source.model, dict.fromkeys(leaves), dict.fromkeys(state))
        self._origin = Origin(source.model, leaves, state)
        # The parts are the user's own modules, each in the mode that the user set.
        self.training = source.model.training

    @property
    def whole_model(self) -> nn.Module:
        """The whole model that this is a stage of."""
        return self._source[0].model

    @property
    def split_backward_note(self) -> str:
        """Why hardly any weight gradient can be put off, as found when backward was last split; empty if most can."""
        return self._release.note

    @property
    def tied_names(self) -> tuple[tuple[str, ...], ...]:
        """The groups of names that are one parameter, of which this stage has at least one.

        A group of one name is a parameter that other stages use by the same name.
        """
        own = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        graph = self._source[0].graph
        runs = self._partition.runs(graph)
        users = Counter(name for nodes in runs for name in {name for node in nodes for name in node.parameters})
        grouped = {name for group in graph.tied for name in group}
        alone = ((name,) for name in users if users[name] > 1 and name in own and name not in grouped)
        return (*(group for group in graph.tied if own & set(group)), *alone)

    def forward(
        self, recording: Any, inputs: Mapping[str, Any], incoming: Mapping[str, Any], seed: int | None = None
    ) -> Values:
        """The values that leave this stage, and those among the model's outputs if it is the last.

        With a seed, random numbers depend on it and the name of the block only.
        """
        self._origin.check_tensors()
        # Several stages may rerun what writes into an input.
        written = recording.graph.written
        values = {name: value.clone() if name in written else value for name, value in inputs.items()}
        values.update(incoming)
        return self._replay(recording).run(values, seed)  # type: ignore[no-any-return]

    def takes_gradients(self, recording: Any) -> bool:
        """Whether one of its blocks takes gradients in its forward, of which weight gradients may be a part."""
        return bool(self._replay(recording).takes_gradients)

    def release(self, queue: list[Deferred]) -> None:
        """Accumulate the weight gradients that were put off, and empty the queue."""
        self._release.look(self.parameters, queue)
        self._release.run(queue)

    def train(self, mode: bool = True) -> "Stage":
        """Set the mode of the parts, and of the modules around them, whose own forward happens between the parts."""
        super().train(mode)
        for module in self._origin.around():
            module.training = mode
        return self

    def _replay(self, recording: Any) -> Any:
        key = (id(recording), self.recomputes)
        kept = self._prepared.get(key)
        if kept is None:
            graph: Graph = recording.graph
            self._origin.check_modules()
            partition = Ownership(self._source[0].graph, self._partition).fit(graph)
            check_guards(recording, partition)
            nodes = [node.name for node in partition.runs(graph)[self.stage_index]]
            wanted = leaving(partition, graph, self.stage_index)
            wrap = Recompute(self, graph) if self.recomputes else None
            kept = (recording, self._source[0].replay(recording, nodes, self, wanted, wrap))
            self._prepared[key] = kept
        return kept[1]


def leaving(partition: Partition, graph: Graph, stage: int) -> tuple[str, ...]:
    """The values that a stage hands on; the last one hands out the outputs of the model."""
    found = [
        value.name for crossing in partition.crossings(graph) if crossing.producer == stage for value in crossing.values
    ]
    outputs = list(graph.outputs) if stage == partition.num_stages - 1 else []
    return tuple(dict.fromkeys((*found, *outputs)))
