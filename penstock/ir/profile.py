"""Profile: seconds and bytes per node, and where they were measured."""

import math
from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property

from penstock.errors import GraphError
from penstock.ir.graph import Graph


@dataclass(frozen=True)
class NodeBytes:
    """Bytes of one node for one microbatch.

    What a node keeps is counted where it is made: what it saves for its backward, and its outputs that later nodes
    save, but not its inputs.
    """

    kept: int = 0
    """held from the forward until the backward"""
    kept_for_weight_grad: int = 0
    """held between the input gradient and the weight gradient: a part of it, and gradients that have come by"""
    peak: int = 0
    """most held at any time while the node runs, above what was held before"""
    parameters: int = 0
    buffers: int = 0
    inputs: int = 0
    outputs: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise GraphError(f"{field.name} must be bytes, 0 or more", bytes=getattr(self, field.name))


@dataclass(frozen=True)
class SavedTensors:
    """What a node holds for its backward, so that the bytes of any stage can be told: its own, and shared memory.

    A value stands for the memory behind it. Several nodes of a stage may hold it, and it is there once; a stage that
    received it has a copy of its own.
    """

    own: int = 0
    """bytes that no other node knows of, from the forward until the backward"""
    values: tuple[str, ...] = ()
    """what it holds of all that it reads and makes, from the forward until the backward"""
    late_own: int = 0
    """bytes of its own that stay until the weight gradient, with gradients that no other node knows of"""
    late_values: tuple[str, ...] = ()
    """what stays until the weight gradient"""
    late_gradients: tuple[str, ...] = ()
    """values that it makes, whose gradients stay until the weight gradient"""

    def __post_init__(self) -> None:
        for name in ("own", "late_own"):
            if getattr(self, name) < 0:
                raise GraphError(f"{name} must be bytes, 0 or more", bytes=getattr(self, name))


@dataclass(frozen=True)
class NodeCost:
    """Seconds of one node for one microbatch, and its bytes; `backward` is a full one, the other two the split one."""

    node: str
    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    memory: NodeBytes = NodeBytes()
    saved: SavedTensors = SavedTensors()

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "input_grad", "weight_grad"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise GraphError(f"{name} must be finite seconds, 0 or more", node=repr(self.node), seconds=value)


@dataclass(frozen=True)
class Profile:
    """The cost of every node of one graph on one device.

    The costs are calibrated: they were scaled so that forward and backward of all nodes take about `step_seconds`, the
    time of the unsplit model. `fingerprint` is that of the graph; `versions` are pairs such as ("torch", "2.13.0").
    `held` are the values that nodes make and may hold, each with the bytes of its memory: empty where nobody looked.
    """

    costs: tuple[NodeCost, ...]
    step_seconds: float
    fingerprint: str
    device: str
    versions: tuple[tuple[str, str], ...] = ()
    held: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for node, times in Counter(cost.node for cost in self.costs).items():
            if times > 1:
                raise GraphError("several costs for one node", node=repr(node), costs=times)
        if not (math.isfinite(self.step_seconds) and self.step_seconds >= 0):
            raise GraphError("step seconds must be finite, 0 or more", seconds=self.step_seconds)

    @classmethod
    def alike(cls, graph: Graph) -> "Profile":
        """Every node costs the same: for a plan of which nothing is left to choose by costs."""
        costs = tuple(NodeCost(node.name, 1.0, 2.0, 1.0, 1.0, NodeBytes()) for node in graph.nodes)
        return cls(costs, 1.0, graph.fingerprint, "not measured")

    def __getitem__(self, node: str) -> NodeCost:
        if node not in self._cost_of:
            raise GraphError("the profile has no such node", node=repr(node))
        return self._cost_of[node]

    def __len__(self) -> int:
        return len(self.costs)

    @cached_property
    def seconds(self) -> float:
        """Forward and full backward of all nodes together."""
        return math.fsum(cost.forward + cost.backward for cost in self.costs)

    def check(self, graph: Graph) -> None:
        """Refuse a graph that this profile was not measured for."""
        if missing := [node.name for node in graph.nodes if node.name not in self._cost_of]:
            raise GraphError("the profile lacks nodes of the graph", lacking=len(missing), first=repr(missing[0]))
        if self.fingerprint != graph.fingerprint:
            raise GraphError(
                "the profile was measured for another graph or other shapes",
                profile=self.fingerprint[:12],
                graph=graph.fingerprint[:12],
                hint="measure this graph",
            )

    @cached_property
    def _cost_of(self) -> dict[str, NodeCost]:
        return {cost.node: cost for cost in self.costs}
