"""A captured model whose nodes are run one at a time, each as a stage of that node alone would run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capture import Captured, Replay, copy_leaf, isolated, storage_id, tensors_in, without_accumulation_hooks
from penstock.ir import Call, Graph, Node, map_leaves, prune_gradients
from penstock.stages import DeferredAccumulator, ForwardRun

Values = dict[str, Any]
Progress = Callable[[int, int], None]
"""called with the number of finished pieces of work and their total"""
CollectLosses = Callable[[], AbstractContextManager[list[Tensor]]]
_ADDED_LOSS = "added losses"
# Comes in with every split run: a run without incoming values would defer its whole backward, as a first stage does.
_UNREAD = {"": torch.zeros(0, requires_grad=True)}


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


class MeasuredModel:
    """The nodes of a captured model, and the model itself, run on its example; `graph` has gradients where trained."""

    def __init__(self, captured: Captured, roots: tuple[str, ...], added_losses: CollectLosses) -> None:
        """`roots` are the values that backward starts from; `added_losses` collects losses added inside modules."""
        self.roots = roots
        self.graph: Graph = prune_gradients(captured.graph, roots, captured.example_recording.nodes_adding_loss)
        self.is_meta = captured.is_meta
        """whether the model has no weights"""
        self._captured, self._added_losses = captured, added_losses
        # Without guards: the whole model checks them, and single nodes need not.
        recording = captured.example_recording
        calls = tuple(step for step in recording.record.steps if isinstance(step, Call))
        self._recording = replace(recording, record=replace(recording.record, steps=calls))
        self._replays: dict[str, Replay] = {}

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._captured.model

    @cached_property
    def calls(self) -> dict[str, Call]:
        """The recorded call of each node."""
        return {step.name: step for step in self._recording.record.steps if isinstance(step, Call)}

    @property
    def live(self) -> Mapping[str, Any]:
        """The functions, classes and constants that calls refer to by key."""
        return self._recording.live

    def inputs(self) -> Values:
        """The tensors of the example by name, in memory of their own."""
        args, kwargs = self._captured.example
        return {name: copy_leaf(value) for name, value in self._captured.inputs(args, kwargs).items()}

    def prepare_node(self, node: str, values: Mapping[str, Any], splits_backward: bool) -> Callable[[], "NodeRun"]:
        """A function that runs the forward of a node on the values that it reads.

        The node may write into them in place; these must not be leaves of a graph.
        """
        if node not in self._replays:
            nodes = [node, *self._makers_of_weight_views(values)]
            wanted = tuple(value.name for value in self.graph[node].makes if value.name in self._read)
            self._replays[node] = Replay(self._recording, nodes, self.model, wanted)
        # Nodes that depend on the inputs only may read their content; all others run on the meta device.
        if self.is_meta and not self.graph[node].from_inputs:
            values = {
                name: value.to("meta") if isinstance(value, Tensor) and not value.is_meta else value
                for name, value in values.items()
            }
        replay = self._replays[node]
        # With the recorded random numbers, on which control flow may depend.
        forward = partial(replay.run, seed=self._recording.seed)
        return self._prepare(forward, values, splits_backward, can_defer=not replay.takes_gradients)

    def prepare_empty_run(self, values: Mapping[str, Any], splits_backward: bool) -> Callable[[], "NodeRun"]:
        """A forward of no node: its time is the overhead of a run."""
        return self._prepare(
            lambda given: {name: value.view_as(value) for name, value in given.items()}, values, splits_backward
        )

    def _prepare(
        self,
        forward: Callable[[Values], Values],
        values: Mapping[str, Any],
        splits_backward: bool,
        can_defer: bool = True,
    ) -> Callable[[], "NodeRun"]:
        # Each value is the start of a graph, unless it is in one.
        inputs = {
            name: value.detach().requires_grad_(value.requires_grad)
            if isinstance(value, Tensor) and value.grad_fn is None
            else value
            for name, value in values.items()
        }
        return lambda: NodeRun(forward, inputs, self._added_losses, splits_backward, can_defer)

    @cached_property
    def _read(self) -> set[str]:
        return {name for node in self.graph.nodes for name in node.reads} | set(self.graph.outputs)

    def _makers_of_weight_views(self, values: Mapping[str, Any]) -> Iterator[str]:
        """The nodes that make those values that are views of parameters.

        They run with the node that reads them: the gradient of a parameter is deferred only through its views.
        """
        for name, value in values.items():
            is_view = isinstance(value, Tensor) and storage_id(value) in self.weight_storage
            if is_view and self._depends_on_weights_only(name):
                yield from self._makers(name)

    def _depends_on_weights_only(self, value: str) -> bool:
        makers = self.graph.makers
        return value in makers and all(map(self._depends_on_weights_only, makers[value].reads))

    def _makers(self, value: str) -> Iterator[str]:
        node = self.graph.makers[value]
        yield node.name
        for name in node.reads:
            yield from self._makers(name)

    @cached_property
    def weight_storage(self) -> set[int]:
        """The ids of the storage of all parameters."""
        return storage_ids(self.model.parameters())

    def prepare_whole(self) -> Callable[[], list[Tensor]]:
        """A function that runs the unsplit model on its example and returns the tensors that backward starts from."""
        args, kwargs = map_leaves(self._captured.example, copy_leaf)
        names = self._captured.output_names(self._captured.example_recording)

        def forward() -> list[Tensor]:
            with self._added_losses() as added:
                output = self._captured.run_unsplit(*args, **kwargs)
            made = zip(names, tensors_in(output), strict=True)
            roots = [tensor for name, tensor in made if name in self.roots]
            return [root for root in (*roots, *added) if root.requires_grad]

        return forward

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Inside, nothing that runs changes the model or steps an optimizer."""
        parameters = {value.name for value in self.graph.parameters}
        written = {name for update in self.graph.updates for name in update.names} & parameters
        with isolated(self.model, written=written), without_accumulation_hooks(self.model):
            yield


class NodeRun(ForwardRun):
    """One forward of a node, kept until its backward, which starts from its outputs and the losses that it adds."""

    def __init__(
        self,
        forward: Callable[[Values], Values],
        values: Values,
        added_losses: CollectLosses,
        splits_backward: bool,
        can_defer: bool,
    ) -> None:
        """Run `forward` on the values, which are not kept. For the flags see `ForwardRun`."""
        given = [values]
        with added_losses() as added:
            super().__init__(
                lambda _: forward(given.pop()),
                _UNREAD if splits_backward else {},
                lambda queue: DeferredAccumulator().run(queue),
                splits_backward=splits_backward,
                can_defer=can_defer,
            )
        self._added: dict[str, Tensor] = {}
        if added:
            total = torch.stack([value.reshape(()) for value in added]).sum()
            self.add_root(_ADDED_LOSS, total)
            self._added[_ADDED_LOSS] = torch.ones_like(total, requires_grad=False)

    @property
    def adds_loss(self) -> bool:
        """Whether the node itself adds a loss, from which a backward starts."""
        return bool(self._added)

    def backward(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return super().backward({**gradients, **self._added})

    def input_grad(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return super().input_grad({**gradients, **self._added})


# Walking through the nodes


@dataclass(frozen=True)
class NodeVisit:
    """A node, and the values that it reads."""

    subject: MeasuredModel
    node: Node
    values: Mapping[str, Any]

    def prepare(self, splits_backward: bool) -> Callable[[], NodeRun]:
        """A function that runs one forward; values that some node writes into are copied."""
        # The copy is not a leaf of a graph: leaves cannot be written in place.
        values = {
            name: value.detach().requires_grad_(value.requires_grad).clone()
            if name in self.subject.graph.written and isinstance(value, Tensor)
            else value
            for name, value in self.values.items()
        }
        return self.subject.prepare_node(self.node.name, values, splits_backward)

    def gradients(self, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Gradients of ones for those outputs that get one in training."""
        specs = {value.name: value.spec for value in self.node.makes}
        return {
            name: torch.ones_like(value, requires_grad=False)
            for name, value in outputs.items()
            if isinstance(value, Tensor) and value.requires_grad and specs[name].requires_grad
        }


def visit_nodes(subject: MeasuredModel, visit: Callable[[NodeVisit], object]) -> dict[str, int]:
    """Visit every node after a first run of it; returns the bytes of the storage behind every value.

    Values in the model's own memory count 0. A node that makes nothing but views of parameters is not visited: its
    readers make the views again, as the gradient of a parameter is deferred only through its views.
    """
    graph, model, values = subject.graph, subject.model, subject.inputs()
    last_readers = {name: node.name for node in graph.nodes for name in node.reads}
    weights = subject.weight_storage
    state = weights | storage_ids(model.buffers())
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        visited = NodeVisit(subject, node, {name: values[name] for name in node.reads})
        outputs = visited.prepare(False)().take_outputs()
        made = {name: value for name, value in outputs.items() if isinstance(value, Tensor)}
        storages = {name: storage_id(value) for name, value in made.items()}
        for name, value in made.items():
            sizes[name] = 0 if storages[name] in state else bytes_behind(value)
            # Cut from its graph, but still trained where the model trains it.
            values[name] = value.detach().requires_grad_(graph.spec(name).requires_grad and value.requires_grad)
        del outputs, made
        if not storages or not weights.issuperset(storages.values()):
            visit(visited)
        for name in (*node.reads, *storages):
            if last_readers.get(name, node.name) == node.name:
                values.pop(name, None)
    return sizes


# Tensors and their storage


def bytes_behind(tensor: Tensor) -> int:
    """Bytes of the storage behind a tensor, which may be more or less than those of its elements."""
    has_storage = storage_id(tensor) >= 0
    return int(tensor.untyped_storage().nbytes()) if has_storage else tensor.numel() * tensor.element_size()


def storage_ids(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of the storages of tensors, except those without plain storage."""
    return {number for number in map(storage_id, tensors) if number >= 0}
