"""Stage: the part of a model that one rank runs, a module with the original names."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.ir.graph import Graph
from penstock.ir.partition import Partition
from penstock.split.skeleton import fill

Values = dict[str, Any]


class Source(Protocol):
    """What a stage asks of a captured model: to prepare some calls of a recording."""

    model: nn.Module

    @property
    def graph(self) -> Graph: ...

    def leaf_modules(self, nodes: Iterable[str]) -> list[str]: ...

    def replay(self, recording: Any, nodes: Any, modules: nn.Module, wanted: Any) -> Any: ...


class Stage(nn.Module):
    """One stage of a partition. Its parts are the model's own modules; its state dict has the model's keys.

    `forward(recording, inputs, incoming)` takes the inputs of the model and the values that cross to this stage, by
    name, and returns the values that leave it. It holds no schedule and no microbatch: those are in a Passage.
    """

    def __init__(self, source: Source, partition: Partition, index: int) -> None:
        super().__init__()
        self.index = index
        self.splits_backward = True
        self._source = (source,)  # in a tuple, so that the whole model is no part of this module
        self._partition = partition
        self._prepared: dict[int, tuple[Any, Any]] = {}
        graph = source.graph
        nodes = partition.runs(graph)[index]
        leaves = source.leaf_modules(node.name for node in nodes)
        state = [name for node in nodes for name in (*node.parameters, *node.buffers)]
        fill(self, source.model, dict.fromkeys(leaves), dict.fromkeys(state))
        self.train(source.model.training)

    @property
    def model(self) -> nn.Module:
        """The whole model that this is a stage of."""
        return self._source[0].model

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """The groups of names that are one parameter, of which this stage has at least one."""
        own = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        return tuple(group for group in self._source[0].graph.tied if own & set(group))

    def forward(self, recording: Any, inputs: Mapping[str, Any], incoming: Mapping[str, Any]) -> Values:
        """The values that leave this stage, and those among the model's outputs if it is the last."""
        # Several stages may rerun what writes into an input.
        own = {name: value.clone() if name in recording.graph.written else value for name, value in inputs.items()}
        return self._replay(recording).run({**own, **incoming})  # type: ignore[no-any-return]

    def _replay(self, recording: Any) -> Any:
        kept = self._prepared.get(id(recording))
        if kept is None:
            graph: Graph = recording.graph
            partition = fitted(self._partition, graph)
            nodes = [node.name for node in partition.runs(graph)[self.index]]
            kept = recording, self._source[0].replay(recording, nodes, self, leaving(partition, graph, self.index))
            self._prepared[id(recording)] = kept
        return kept[1]


def fitted(partition: Partition, graph: Graph) -> Partition:
    """The partition for a graph of the same model whose glue differs: new nodes go where their values are."""
    known = {name: stage for stage, names in enumerate(partition.stages) for name in names}
    placed: dict[str, int] = {}
    for node in graph.nodes:
        read = [placed[graph.makers[value].name] for value in node.reads if value in graph.makers]
        placed[node.name] = known.get(node.name, max(read, default=0))
    stages = (tuple(n for n, at in placed.items() if at == stage) for stage in range(partition.num_stages))
    return Partition(tuple(stages))


def leaving(partition: Partition, graph: Graph, stage: int) -> tuple[str, ...]:
    """The values that a stage hands on; the last one hands out the outputs of the model."""
    found = [
        value.name for crossing in partition.crossings(graph) if crossing.producer == stage for value in crossing.values
    ]
    outputs = list(graph.outputs) if stage == partition.num_stages - 1 else []
    return tuple(dict.fromkeys((*found, *outputs)))


class Passage:
    """One forward of a stage, kept until its backward."""

    def __init__(self, stage: Stage, recording: Any, inputs: Mapping[str, Any], incoming: Mapping[str, Any]) -> None:
        self.stage = stage
        self.entered = {name: _entered(value) for name, value in incoming.items()}
        # What is written in place must not be the start of a graph, nor shared with who sent it.
        given = {
            name: value.clone() if name in recording.graph.written else value for name, value in self.entered.items()
        }
        self.left = stage(recording, inputs, given)
        self._roots: list[tuple[Tensor, Tensor | None]] = []

    def backward(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Accumulate the stage's gradients; returns those of the values that came in."""
        self._backward(gradients, None, keep=False)
        return self._returned()

    def input_grad(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Only the gradients of the values that came in; `weight_grad` must follow."""
        leaves = [value for value in self.entered.values() if _wants_gradient(value)]
        if not leaves:
            self._remember(gradients)
        elif self.stage.splits_backward:
            self._split_backward(gradients, leaves)
        else:
            self._backward(gradients, None, keep=False)
            self._roots = []
        return self._returned()

    def _split_backward(self, gradients: Mapping[str, Tensor | None], leaves: list[Tensor]) -> None:
        try:
            self._backward(gradients, leaves, keep=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            # Reentrant recomputation runs a whole backward or none.
            self.stage.splits_backward = False
            self._backward(gradients, None, keep=False)
            self._roots = []

    def weight_grad(self) -> None:
        """The gradients of the parameters, after `input_grad`."""
        parameters = [parameter for parameter in self.stage.parameters() if parameter.requires_grad]
        if self._roots and parameters:
            tensors, gradients = zip(*self._roots, strict=True)
            has_inputs = any(map(_wants_gradient, self.entered.values()))
            torch.autograd.backward(tensors, gradients, inputs=parameters if has_inputs else None)
        self._roots = []

    def _remember(self, gradients: Mapping[str, Tensor | None]) -> None:
        self._roots = [
            (self.left[name], gradient)
            for name, gradient in gradients.items()
            if isinstance(self.left.get(name), Tensor) and self.left[name].requires_grad
        ]

    def _backward(self, gradients: Mapping[str, Tensor | None], leaves: list[Tensor] | None, keep: bool) -> None:
        self._remember(gradients)
        if self._roots:
            tensors, values = zip(*self._roots, strict=True)
            torch.autograd.backward(tensors, values, inputs=leaves, retain_graph=keep)

    def _returned(self) -> dict[str, Tensor | None]:
        return {name: value.grad for name, value in self.entered.items() if _wants_gradient(value)}


def _entered(value: Any) -> Any:
    """A value as it comes in: the start of a new graph."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
