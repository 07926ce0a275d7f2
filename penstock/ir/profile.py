"""Measured seconds and bytes of every node, and where they were measured."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from penstock.errors import GraphError
from penstock.ir.action import Kind
from penstock.ir.graph import Graph

SECONDS, BYTES = {"unit": "seconds"}, {"unit": "bytes"}
"""metadata of the fields of NodeCost and StageCosts, by which code finds all terms of one unit"""
PASS_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input_grad",
    Kind.WEIGHT_GRAD: "weight_grad",
}
"""the fields of NodeCost and StageCosts that hold the seconds of each kind of pass"""


def term_names(record: type[Any], unit: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the fields of a record that have the metadata SECONDS or BYTES."""
    return tuple(each.name for each in fields(record) if each.metadata == unit)


@dataclass(frozen=True)
class NodeBytes:
    """Bytes of one node for one microbatch.

    A saved tensor is counted at the node that makes it: the node's own intermediate tensors and the outputs that
    later nodes save, but not its inputs.
    """

    kept: int = 0
    """held from the forward until the backward"""
    kept_for_weight_grad: int = 0
    """held between the input gradient and the weight gradient: a part of `kept`, plus output gradients"""
    peak: int = 0
    """maximum while the node runs, in addition to the bytes held before"""
    parameters: int = 0
    """bytes of its parameters"""
    buffers: int = 0
    """bytes of its buffers"""
    inputs: int = 0
    """bytes that it reads"""
    outputs: int = 0
    """bytes that it makes"""

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 0:
                raise GraphError(f"{each.name} must be bytes, 0 or more", bytes=getattr(self, each.name))


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that a node saves for its backward: bytes of its own, and values that nodes may share.

    A value stands for the storage behind it. Nodes of one stage that save the same value hold it once; a stage that
    received the value has a copy.
    """

    own: int = 0
    """bytes that no other node shares, from the forward until the backward"""
    values: tuple[str, ...] = ()
    """values that it reads or makes and saves, from the forward until the backward"""
    late_own: int = 0
    """bytes of its own that are held until the weight gradient"""
    late_values: tuple[str, ...] = ()
    """values held until the weight gradient"""
    late_gradients: tuple[str, ...] = ()
    """values that it makes, whose gradients are held until the weight gradient"""

    def __post_init__(self) -> None:
        for name in ("own", "late_own"):
            if getattr(self, name) < 0:
                raise GraphError(f"{name} must be bytes, 0 or more", bytes=getattr(self, name))


@dataclass(frozen=True)
class NodeCost:
    """Seconds and bytes of one node for one microbatch; `backward` is a full one, the other two are a split one."""

    node: str
    """name of the node"""
    forward: float = field(metadata=SECONDS)
    """seconds of the forward"""
    backward: float = field(metadata=SECONDS)
    """seconds of a full backward"""
    input_grad: float = field(metadata=SECONDS)
    """seconds of the gradient of its inputs"""
    weight_grad: float = field(metadata=SECONDS)
    """seconds of the gradient of its parameters"""
    memory: NodeBytes = NodeBytes()
    """bytes held and moved"""
    saved: SavedTensors = SavedTensors()
    """tensors saved for the backward"""
    flops: float = 0.0
    """floating-point operations of the forward, without those that are bound by memory; 0 if not counted"""

    def __post_init__(self) -> None:
        for name in NODE_SECONDS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise GraphError(f"{name} must be finite seconds, 0 or more", node=repr(self.node), seconds=value)

    def seconds_of(self, kind: Kind) -> float:
        """Seconds of a kind of pass. Whatever adds to the time of a pass is added here, as in `StageCosts.seconds`."""
        seconds: float = getattr(self, PASS_NAMES[kind])
        return seconds

    @property
    def seconds(self) -> float:
        """Forward and full backward."""
        return self.seconds_of(Kind.FORWARD) + self.seconds_of(Kind.BACKWARD)


NODE_SECONDS = term_names(NodeCost, SECONDS)
"""the fields of NodeCost that are seconds; those of a stage, under the same names, are their sums"""


@dataclass(frozen=True)
class Profile:
    """The cost of every node of one graph on one device.

    The costs are scaled so that forward and backward of all nodes add up to about `step_seconds`, the time of the
    unsplit model. `fingerprint` is that of the graph; `versions` are pairs such as ("torch", "2.13.0"). `held` lists
    the values that nodes save, each with the bytes of its storage; empty if saved tensors were not recorded.
    """

    costs: tuple[NodeCost, ...]
    """one entry per node"""
    step_seconds: float
    """measured time of forward and backward of the unsplit model"""
    fingerprint: str
    """that of the graph that was measured"""
    device: str
    """name of the device"""
    versions: tuple[tuple[str, str], ...] = ()
    """pairs such as ("torch", "2.13.0")"""
    held: tuple[tuple[str, int], ...] = ()
    """values that nodes save, each with the bytes of its storage; empty if saved tensors were not recorded"""
    cpu_share: float = 1.0
    """CPU seconds per second of the unsplit model: below 1 if it waits, above if it has several threads"""

    def __post_init__(self) -> None:
        for node, times in Counter(cost.node for cost in self.costs).items():
            if times > 1:
                raise GraphError("a node must have one cost only", node=repr(node), costs=times)
        if not (math.isfinite(self.step_seconds) and self.step_seconds >= 0):
            raise GraphError("step seconds must be finite, 0 or more", seconds=self.step_seconds)
        if not (math.isfinite(self.cpu_share) and self.cpu_share >= 0):
            raise GraphError("cpu_share must be finite, 0 or more", got=self.cpu_share)

    @classmethod
    def uniform(cls, graph: Graph) -> "Profile":
        """Every node costs the same: for plans whose choices do not depend on costs."""
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
        """Sum of forward and full backward over all nodes."""
        return math.fsum(cost.seconds for cost in self.costs)

    @property
    def model_flops(self) -> float:
        """Floating-point operations of forward and backward, taken as three forwards; 0 if they were not counted."""
        return 3 * math.fsum(cost.flops for cost in self.costs)

    def check(self, graph: Graph) -> None:
        """Raise if the profile was not measured for this graph."""
        if missing := [node.name for node in graph.nodes if node.name not in self._cost_of]:
            raise GraphError("the profile lacks nodes of the graph", lacking=len(missing), first=repr(missing[0]))
        if self.fingerprint != graph.fingerprint:
            raise GraphError(
                "the profile was measured for another graph or other shapes",
                profile=self.fingerprint[:12],
                graph=graph.fingerprint[:12],
                hint="measure this graph",
            )

    def with_loss_in_output(self, graph: Graph) -> "Profile":
        """The profile of a graph, if this is one of the same graph with a loss added to it.

        The costs of the nodes of the loss are added to those of the last node that makes an output.
        """
        known = {node.name for node in graph.nodes}
        values = {value.name for value in (*graph.inputs, *(value for node in graph.nodes for value in node.makes))}
        sizes, of_loss = dict(self.held), [cost for cost in self.costs if cost.node not in known]
        last = next(
            node.name for node in reversed(graph.nodes) if any(value.name in graph.outputs for value in node.makes)
        )
        total = self[last]
        saved = [name for cost in (total, *of_loss) for name in cost.saved.values]
        # Values of the loss itself are not in the graph: they are bytes that no other node shares.
        own = sum(cost.saved.own for cost in (total, *of_loss)) + sum(
            sizes[name] for name in dict.fromkeys(saved) if name not in values
        )
        seconds = {
            name: getattr(total, name) + math.fsum(getattr(cost, name) for cost in of_loss) for name in NODE_SECONDS
        }
        # A loss has no weights.
        seconds["input_grad"] = total.input_grad + math.fsum(cost.input_grad + cost.weight_grad for cost in of_loss)
        seconds["weight_grad"] = total.weight_grad
        total = replace(
            total,
            **seconds,
            memory=replace(
                total.memory,
                kept=total.memory.kept + sum(cost.memory.kept for cost in of_loss),
                peak=max(cost.memory.peak for cost in (total, *of_loss)),
            ),
            saved=replace(total.saved, own=own, values=tuple(dict.fromkeys(name for name in saved if name in values))),
            flops=math.fsum(cost.flops for cost in (total, *of_loss)),
        )
        return replace(
            self,
            costs=tuple(total if node.name == last else self[node.name] for node in graph.nodes),
            fingerprint=graph.fingerprint,
            held=tuple((name, size) for name, size in self.held if name in values),
        )

    @cached_property
    def _cost_of(self) -> dict[str, NodeCost]:
        return {cost.node: cost for cost in self.costs}
