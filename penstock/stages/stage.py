"""A stage: the piece of a model that one rank runs, as a module with the model's own names."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from penstock.capture import Captured, DrawSeed, LruCache, Recording, Replay, outer_modules
from penstock.errors import PartitionError
from penstock.ir import Partition
from penstock.stages.cut_checks import check_guards, check_shared_memory
from penstock.stages.deferral import Deferred, DeferredAccumulator
from penstock.stages.ownership import Ownership
from penstock.stages.recompute import recomputed

Values = dict[str, Any]


class Fit(NamedTuple):
    """A partition fitted to a recording, by stage: the nodes that the stage runs, and the values that leave it.

    The outputs of the model leave the last stage.
    """

    nodes: tuple[list[str], ...]
    leaving: list[tuple[str, ...]]


class PartitionedModel:
    """A captured model and its partition: what all of its stages have in common, found once for all of them."""

    def __init__(self, captured: Captured, partition: Partition) -> None:
        self.captured, self.partition = captured, partition
        graph = captured.graph
        check_shared_memory(captured.model, graph, partition)
        self._owners = Ownership(graph, partition)
        self.stage_nodes = partition.runs(graph)
        """by stage, the nodes that it runs"""
        # The parts of other blocks that were not called, such as a ParameterList, are registered one by one.
        uncalled = filter(self._owners.is_within_one_stage, captured.uncalled_blocks())
        self.uncalled_blocks = self._owners.by_stage(uncalled)
        self.unused_state = self._owners.by_stage(self._owners.unused)
        self._fits: LruCache[Recording, Fit] = LruCache()

    def fit(self, recording: Recording) -> Fit:
        """The stages for a recording: another kind of batch may have other nodes than the example that was cut."""

        def make() -> Fit:
            graph = recording.graph
            partition = self._owners.fit(graph)
            check_guards(recording, partition)
            nodes = tuple([node.name for node in nodes] for nodes in partition.runs(graph))
            leaving: list[dict[str, None]] = [{} for _ in nodes]
            for crossing in partition.crossings(graph):
                leaving[crossing.producer].update((value.name, None) for value in crossing.values)
            leaving[-1].update(dict.fromkeys(graph.outputs))
            return Fit(nodes, list(map(tuple, leaving)))

        return self._fits.get_or_make(recording, make)


class Stage(nn.Module):
    """One stage of a partition. Its submodules are the model's own; its state dict has the model's keys.

    `forward(recording, inputs, incoming)` takes the inputs of the model and the values that other stages send to this
    one, by name, and returns the values that leave it. Schedules and microbatches are not its concern: `StageRun` is
    one forward with its backward.

    If it `recomputes`, each block saves only its arguments until backward, where it runs again; hooks on the block are
    then called twice.
    """

    def __init__(self, partitioned: PartitionedModel, index: int, recomputes: bool = False) -> None:
        super().__init__()
        self.stage_index, self.recomputes = index, recomputes
        self._partitioned, captured = partitioned, partitioned.captured
        self._replays: LruCache[tuple[Recording, bool], Replay] = LruCache()
        self._deferred_accumulator = DeferredAccumulator()
        model, nodes = captured.model, partitioned.stage_nodes[index]
        blocks = [node.module for node in nodes if node.is_block]
        blocks += partitioned.uncalled_blocks.get(index, [])
        state = [name for node in nodes for name in (*node.parameters, *node.buffers)]
        state += partitioned.unused_state.get(index, [])
        register_by_name(self, model, dict.fromkeys(blocks), dict.fromkeys(state))
        self._stage_blocks = {name: model.get_submodule(name) for name in blocks}
        self._loose_state = _loose_state(model, blocks, state)
        # The submodules are the user's own, each in the mode that the user set: self.train() would change them.
        self.training = model.training

    @property
    def whole_model(self) -> nn.Module:
        """The model that this is a stage of."""
        return self._partitioned.captured.model

    @property
    def split_backward_note(self) -> str:
        """Why few weight gradients can be deferred, as seen when backward was last split; empty if most can."""
        return self._deferred_accumulator.note

    def forward(
        self, recording: Recording, inputs: Mapping[str, Any], incoming: Mapping[str, Any], seed: DrawSeed | None = None
    ) -> Values:
        """The values that leave this stage; of the last stage, those in the model's output.

        With a seed, random numbers depend only on it and the name of the block. Call `check_state` before each step.
        """
        values = {**inputs, **incoming}
        # Several stages may run a call that writes into an input, so each works on its own copy.
        if recording.written_inputs:
            for name in recording.written_inputs & inputs.keys() - incoming.keys():
                values[name] = inputs[name].clone()
        return self._replay(recording).run(values, seed)

    def takes_gradients(self, recording: Recording) -> bool:
        """Whether one of its blocks runs autograd in its forward."""
        return self._replay(recording).takes_gradients

    def accumulate_deferred(self, queue: list[Deferred]) -> None:
        """Accumulate the weight gradients that were deferred, and empty the queue."""
        self._deferred_accumulator.note_share(self.parameters, queue)
        self._deferred_accumulator.run(queue)

    def check_state(self) -> None:
        """Raise a PartitionError if the model has another tensor in place of a parameter or buffer of this stage."""
        for path, kind, name, tensor in self._loose_state:
            if kind.get(name) is not tensor:
                raise PartitionError(
                    "a parameter or buffer was replaced after the split",
                    name=path,
                    hint="write into it (with torch.no_grad(): tensor.copy_(...)), or make a new Pipeline",
                )

    def train(self, mode: bool = True) -> "Stage":
        """Set the mode of the submodules, and of the modules around them, whose forward is the code between them."""
        super().train(mode)
        for name in self._stage_blocks:
            for outer in outer_modules(name):
                self.whole_model.get_submodule(outer).training = mode
        return self

    def _replay(self, recording: Recording) -> Replay:
        """The calls of this stage in a recording, prepared once."""
        return self._replays.get_or_make((recording, self.recomputes), lambda: self._prepare_replay(recording))

    def _prepare_replay(self, recording: Recording) -> Replay:
        captured = self._partitioned.captured
        for name, module in self._stage_blocks.items():
            if captured.model.get_submodule(name) is not module:
                hint = "a new plan and Pipeline, or capture and split again"
                raise PartitionError("a module was replaced after the split", module=name, hint=hint)
        fit = self._partitioned.fit(recording)
        wrap = partial(recomputed, self, recording.graph) if self.recomputes else None
        nodes, leaving = fit.nodes[self.stage_index], fit.leaving[self.stage_index]
        return Replay(recording, nodes, self, leaving, captured.model, wrap)


def register_by_name(tree: nn.Module, model: nn.Module, modules: Iterable[str], state: Iterable[str]) -> None:
    """Register modules, and single parameters and buffers, of the model in `tree` under their names in the model."""
    for path in modules:
        parent, _, name = path.rpartition(".")
        _branch(tree, parent).add_module(name, model.get_submodule(path))
    for path in state:
        parent, _, name = path.rpartition(".")
        owner, branch = model.get_submodule(parent), _branch(tree, parent)
        if branch is owner or name in branch._parameters or name in branch._buffers:
            continue
        if name in owner._parameters:
            branch.register_parameter(name, owner._parameters[name])
        elif name in owner._buffers:
            branch.register_buffer(name, owner._buffers[name], persistent=name not in owner._non_persistent_buffers_set)


def _branch(tree: nn.Module, path: str) -> nn.Module:
    """The module at a path, creating empty modules where the path does not exist yet."""
    for name in path.split(".") if path else ():
        if name not in tree._modules:
            tree.add_module(name, nn.Module())
        tree = tree._modules[name]
    return tree


def _loose_state(
    model: nn.Module, blocks: Iterable[str], state: Iterable[str]
) -> list[tuple[str, dict[str, Any], str, object]]:
    """The parameters and buffers of a stage that are not inside its blocks: path, dict of the owner, name, tensor."""
    inside = tuple(f"{name}." for name in blocks)
    entries: list[tuple[str, dict[str, Any], str, object]] = []
    for path in dict.fromkeys(state):
        if not path.startswith(inside):
            parent, _, name = path.rpartition(".")
            owner = model.get_submodule(parent)
            tensors: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
            entries.append((path, tensors, name, tensors.get(name)))
    return entries
