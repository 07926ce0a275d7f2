"""Solo: a captured model whose nodes run one at a time, each as the runtime would run a stage of that node alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from penstock.capture import Captured
from penstock.ir import Call, Graph, leaves, prune_gradients, transform
from penstock.measure import address_of, addresses
from penstock.runtime.adding import added_losses
from penstock.runtime.roots import roots_of
from penstock.runtime.solo_run import Part, Run

Values = dict[str, Any]


class Solo:
    """The nodes of a captured model, and the model itself, to be run on its example; `graph` says what is trained."""

    def __init__(self, captured: Captured, graph: Graph, roots: tuple[str, ...]) -> None:
        """`roots` are the values that backward starts from."""
        self.graph, self.roots = graph, roots
        self._captured = captured
        # What the model reads from tensors is read by the whole model only, not again by every node.
        recording = captured.first
        calls = tuple(step for step in recording.record.steps if isinstance(step, Call))
        self._recording = replace(recording, record=replace(recording.record, steps=calls))
        self._plays: dict[str, Callable[[Values], Values]] = {}
        self.is_meta = captured.is_meta
        """whether the model has no numbers"""

    @classmethod
    def of(cls, captured: Captured, has_loss_fn: bool = False) -> "Solo":
        """A captured model, trained as a plan without or with a loss function would train it."""
        roots = roots_of(captured, has_loss_fn)
        return cls(captured, prune_gradients(captured.graph, roots, captured.first.nodes_adding_loss), roots)

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._captured.model

    @cached_property
    def calls(self) -> dict[str, Call]:
        """What each node calls, with which arguments."""
        return {step.name: step for step in self._recording.record.steps if isinstance(step, Call)}

    @property
    def live(self) -> Mapping[str, Any]:
        """The functions, classes and constants that calls mention by a key."""
        return self._recording.live

    def inputs(self) -> Values:
        """The tensors of the example by name, in memory of their own."""
        args, kwargs = self._captured.example
        return {name: _copied(value) for name, value in self._captured.inputs(args, kwargs).items()}

    def wanted(self, node: str) -> tuple[str, ...]:
        """What a node makes and somebody reads."""
        read = self._read
        return tuple(value.name for value in self.graph[node].makes if value.name in read)

    @cached_property
    def _read(self) -> set[str]:
        return {name for node in self.graph.nodes for name in node.reads} | set(self.graph.outputs)

    def ready(self, node: str, values: Mapping[str, Any], is_split: bool) -> Callable[[], Run]:
        """The forward of one node on the values that it reads, about to run.

        It writes into those that it writes into; they must not be leaves of a graph.
        """
        if node not in self._plays:
            nodes = [node, *self._views_of_parameters(values)]
            self._plays[node] = self._captured.replay(self._recording, nodes, self.model, self.wanted(node)).run
        # What depends on the inputs only may look at their numbers; all else has none to compute with.
        if self.is_meta and not self.graph[node].from_inputs:
            values = _on_meta(values)
        own = {name: _start(value) for name, value in values.items()}
        return lambda: Run(Part(self._plays[node], own), is_split)

    def idle(self, values: Mapping[str, Any], is_split: bool) -> Callable[[], Run]:
        """A forward of no node, which only looks at what it was given: its time is what running alone takes."""

        def look(given: Values) -> Values:
            return {name: value.view_as(value) for name, value in given.items()}

        own = {name: _start(value) for name, value in values.items()}
        return lambda: Run(Part(look, own), is_split)

    def _views_of_parameters(self, values: Mapping[str, Any]) -> Iterator[str]:
        """The nodes that make those values that are views of parameters, also views of views.

        They are run with the node that reads them: the gradient of a parameter is put off through its views only.
        """
        for name, value in values.items():
            if self._is_weight(value) and self._is_from_weights(name):
                yield from self._makers(name)

    def _is_from_weights(self, value: str) -> bool:
        """Whether nothing but parameters is needed to make a value."""
        return value in self.graph.makers and all(map(self._is_from_weights, self.graph.makers[value].reads))

    def _makers(self, value: str) -> Iterator[str]:
        node = self.graph.makers[value]
        yield node.name
        for name in node.reads:
            yield from self._makers(name)

    def _is_weight(self, value: Any) -> bool:
        return isinstance(value, Tensor) and address_of(value) in self._weights

    @cached_property
    def _weights(self) -> set[int]:
        return addresses(self.model.parameters())

    def whole(self) -> Callable[[], list[Tensor]]:
        """A forward of the unsplit model on its example, which returns what backward starts from."""
        args, kwargs = transform(self._captured.example, _copied)
        names = self._captured.output_names(self._captured.first)

        def forward() -> list[Tensor]:
            with added_losses() as added:
                output = self._captured.whole(*args, **kwargs)
            tensors = (leaf for leaf in leaves(output) if isinstance(leaf, Tensor))
            found = {name: tensor for name, tensor in zip(names, tensors, strict=True) if name in self.roots}
            return [root for root in (*found.values(), *added) if root.requires_grad]

        return forward

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, whatever is run leaves the model and its surroundings as they were, and steps no optimizer."""
        parameters = {value.name for value in self.graph.parameters}
        written = {name for update in self.graph.updates for name in update.names} & parameters
        with self._captured.isolated(written=written), self._captured.without_accumulation_hooks():
            yield


def _on_meta(values: Mapping[str, Any]) -> Values:
    return {name: v.to("meta") if isinstance(v, Tensor) and not v.is_meta else v for name, v in values.items()}


def _start(value: Any) -> Any:
    """A value as the start of a graph, unless it is in one."""
    if not isinstance(value, Tensor) or value.grad_fn is not None:
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _copied(leaf: object) -> object:
    """The model may write into its inputs."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
