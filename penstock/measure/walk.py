"""Walk: goes through the nodes of a model in their order, with the values that each of them reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.ir import Graph, Node, TensorSpec
from penstock.measure.ledger import address_of, addresses, bytes_behind
from penstock.measure.subject import Run, Subject


@dataclass(frozen=True)
class Situation:
    """A node, and the values that it reads."""

    subject: Subject
    node: Node
    values: Mapping[str, Any]

    def ready(self, is_split: bool) -> Callable[[], Run]:
        """One forward, about to run; what some node writes into is a copy."""
        written = self.subject.graph.written
        values = {name: _copy(value) if name in written else value for name, value in self.values.items()}
        return self.subject.ready(self.node.name, values, is_split)

    def gradients(self, left: Mapping[str, Any]) -> dict[str, Tensor]:
        """Gradients of those values that the node made for which one returns."""
        specs = {value.name: value.spec for value in self.node.makes}
        return {
            name: torch.ones_like(value, requires_grad=False)
            for name, value in left.items()
            if isinstance(value, Tensor) and value.requires_grad and specs[name].requires_grad
        }


def walk(subject: Subject, visit: Callable[[Situation], object]) -> dict[str, int]:
    """Visit every node after a first run of it; the bytes of the memory behind every value that the nodes make.

    What lies in the model's own memory has none. A node that makes nothing but views of parameters is not visited: who
    reads such a view makes it again, as the gradient of a parameter can be put off through its views only.
    """
    graph, model, values = subject.graph, subject.model, subject.inputs()
    last, weights = _last_readers(graph), addresses(model.parameters())
    state = weights | addresses(model.buffers())
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        situation = Situation(subject, node, {name: values[name] for name in node.reads})
        left = situation.ready(False)().take_outputs()
        made = {name: value for name, value in left.items() if isinstance(value, Tensor)}
        places = {name: address_of(value) for name, value in made.items()}
        for name, value in made.items():
            sizes[name] = 0 if places[name] in state else bytes_behind(value)
            values[name] = _settled(value, graph.spec(name))
        del left, made
        if not places or not weights.issuperset(places.values()):
            visit(situation)
        for name in (*node.reads, *places):
            if last.get(name, node.name) == node.name:
                values.pop(name, None)
    return sizes


def _last_readers(graph: Graph) -> dict[str, str]:
    return {name: node.name for node in graph.nodes for name in node.reads}


def _settled(value: Tensor, spec: TensorSpec) -> Tensor:
    """The value without the way that it was made."""
    own = value.detach()
    return own.requires_grad_() if spec.requires_grad and value.requires_grad else own


def _copy(value: Any) -> Any:
    """In memory of its own, and no leaf of a graph: those cannot be written."""
    return value.detach().requires_grad_(value.requires_grad).clone() if isinstance(value, Tensor) else value
