"""Findings: what was found out about single nodes, put together to a Profile."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from penstock.ir import Graph, Node, NodeBytes, NodeCost, Profile, SavedTensors
from penstock.measure.memory import Memory
from penstock.measure.times import Times


@dataclass(frozen=True)
class Findings:
    """Seconds and memory of the nodes, nothing for those left out, and the bytes of the memory behind every value."""

    graph: Graph
    times: Mapping[str, Times]
    memory: Mapping[str, Memory]
    sizes: Mapping[str, int]

    def profile(self, step_seconds: float | None, device: str, versions: tuple[tuple[str, str], ...]) -> Profile:
        """The profile; without the seconds of a step, those of all nodes together."""
        held, late = self._held(), self._late()
        costs = tuple(self._cost(node, held, late) for node in self.graph.nodes)
        total = math.fsum(times.step for times in self.times.values())
        pairs = tuple((name, size) for name, size in self.sizes.items() if self._first(name) == name)
        seconds = total if step_seconds is None else step_seconds
        return Profile(costs, seconds, self.graph.fingerprint, device, versions, pairs)

    def _cost(self, node: Node, held: Mapping[str, None], late: Mapping[str, None]) -> NodeCost:
        (holds, peak), graph = self.memory.get(node.name, Memory()), self.graph
        made = {self._first(value.name) for value in node.makes}
        own = [name for name in made if name in graph.makers and graph.makers[name] is node]
        gradients = sum(graph.spec(name).bytes for name in holds.late_gradients)
        memory = NodeBytes(
            kept=holds.own + sum(self.sizes.get(name, 0) for name in own if name in held),
            kept_for_weight_grad=holds.late_own + gradients + sum(self.sizes.get(n, 0) for n in own if n in late),
            peak=peak,
            parameters=self._state_bytes(node.parameters),
            buffers=self._state_bytes(node.buffers),
            inputs=sum(graph.spec(name).bytes for name in node.reads),
            outputs=sum(value.spec.bytes for value in node.makes),
        )
        return NodeCost(node.name, *self.times.get(node.name, Times()), memory, self._named(holds))

    def _named(self, holds: SavedTensors) -> SavedTensors:
        """Values by the first name of their memory; inputs of the model are there in any case."""
        return SavedTensors(
            holds.own,
            self._shared(holds.values),
            holds.late_own,
            self._shared(holds.late_values),
            holds.late_gradients,
        )

    def _shared(self, values: tuple[str, ...]) -> tuple[str, ...]:
        names = dict.fromkeys(map(self._first, values))
        return tuple(name for name in names if name in self.graph.makers)

    def _held(self) -> dict[str, None]:
        return {name: None for found in self.memory.values() for name in self._shared(found.holds.values)}

    def _late(self) -> dict[str, None]:
        return {name: None for found in self.memory.values() for name in self._shared(found.holds.late_values)}

    def _state_bytes(self, names: tuple[str, ...]) -> int:
        return sum(self._state[name] for name in {self.graph.tensor_of(name) for name in names})

    @cached_property
    def _state(self) -> dict[str, int]:
        return {value.name: value.spec.bytes for value in (*self.graph.parameters, *self.graph.buffers)}

    def _first(self, value: str) -> str:
        return self._firsts.get(value, value)

    @cached_property
    def _firsts(self) -> dict[str, str]:
        return {name: group.values[0] for group in self.graph.storage for name in group.values}


def versions() -> tuple[tuple[str, str], ...]:
    """What the figures depend on besides the model and the device."""
    return (("torch", str(torch.__version__)), ("threads", str(torch.get_num_threads())))
