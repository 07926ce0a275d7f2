"""Graph: the model as named nodes and the values between them."""

import hashlib
import json
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.errors import GraphError

ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2", "quint8", "qint8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element, by torch's names of the types."""


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor without holding it; `dtype` is torch's name without `torch.`."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = False
    order: tuple[int, ...] = ()
    """the dimensions as they lie in memory, outermost first; empty if that is their own order"""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise GraphError("unknown dtype", dtype=repr(self.dtype), hint="a name such as float32, bfloat16 or int64")
        if any(size < 0 for size in self.shape):
            raise GraphError("a shape needs sizes of 0 or more", shape=self.shape)
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            raise GraphError("an order names every dimension once", order=self.order, shape=self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Value:
    """A tensor with a name: an input, what a node makes, a parameter or a buffer."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True)
class Node:
    """One call of the model: a module that is kept whole, or a function between modules.

    `reads` names inputs of the graph and values of earlier nodes; parameters and buffers go by their original names.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[Value, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    from_inputs: bool = False
    """depends on the inputs of the graph only, such as a mask: every stage that reads it runs it again"""
    module: str = ""
    """the module whose call this is, or in whose forward it happens, by its original name"""
    kind: str = ""
    """the class of the module, or the name of the function"""
    is_leaf: bool = False
    """whether this is the call of a whole module, which the record does not look into"""
    is_random: bool = False
    """draws random numbers, as dropout does"""


@dataclass(frozen=True)
class StorageGroup:
    """Values that share memory, and the nodes that write into it in place after it was made."""

    values: tuple[str, ...]
    writers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Update:
    """A node that writes some of its parameters and buffers, such as the running mean of a batch norm."""

    node: str
    names: tuple[str, ...]


class Edge(NamedTuple):
    """A value that one node makes and another reads."""

    producer: str
    consumer: str
    value: str


@dataclass(frozen=True)
class Graph:
    """A model: its nodes in an order in which they can run, with all that they read and make.

    Every name of a parameter is listed, also several of one tensor: `tied` groups those. `outputs` names the values
    that the model returns, inputs among them if it returns those.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Value, ...] = ()
    buffers: tuple[Value, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    storage: tuple[StorageGroup, ...] = ()
    updates: tuple[Update, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes:
            raise GraphError("a graph without nodes")
        _check_distinct("node", (node.name for node in self.nodes))
        _check_distinct("value", (value.name for value in self._values()))
        _check_distinct("parameter or buffer", (value.name for value in (*self.parameters, *self.buffers)))
        _check_distinct("tied parameter", (name for group in self.tied for name in group))
        _check_distinct("value in a storage group", (name for group in self.storage for name in group.values))
        self._check_reads()
        self._check_names()

    def _values(self) -> Iterator[Value]:
        yield from self.inputs
        for node in self.nodes:
            yield from node.makes

    def _check_reads(self) -> None:
        known, free = {value.name for value in self.inputs}, {value.name for value in self.inputs}
        for node in self.nodes:
            _check_known("a node reads a value that no earlier node makes", node.reads, known, node=node.name)
            if node.from_inputs:
                _check_known("a node from inputs only reads another value", node.reads, free, node=node.name)
                free.update(value.name for value in node.makes)
            known.update(value.name for value in node.makes)
        _check_known("an output that no node makes", self.outputs, known)

    def _check_names(self) -> None:
        state = {value.name: (value.spec.shape, value.spec.dtype) for value in (*self.parameters, *self.buffers)}
        for node in self.nodes:
            names = (*node.parameters, *node.buffers)
            _check_known("a node uses a parameter or buffer that the graph does not list", names, state, node=node.name)
        for tied in self.tied:
            _check_known("a tied parameter that the graph does not list", tied, state)
            if len({state[name] for name in tied}) > 1:
                raise GraphError("tied parameters differ in shape or dtype", names=tied)
        for group in self.storage:
            _check_known("a storage group names no value of the graph", group.values, self._spec_of)
            _check_known("a storage group is written by no node of the graph", group.writers, self._node_of)
        for update in self.updates:
            node = self[update.node]
            own = {self.tensor_of(name) for name in (*node.parameters, *node.buffers)}
            written = map(self.tensor_of, update.names)
            _check_known("a node writes a parameter or buffer that it does not use", written, own, node=node.name)

    def __getitem__(self, name: str) -> Node:
        _check_known("no such node", (name,), self._node_of)
        return self._node_of[name]

    def spec(self, value: str) -> TensorSpec:
        """The spec of an input or of what a node makes."""
        _check_known("no such value", (value,), self._spec_of)
        return self._spec_of[value]

    def tensor_of(self, parameter: str) -> str:
        """The name that stands for the tensor: the first of its tied names, or its own."""
        return self._first_name.get(parameter, parameter)

    @cached_property
    def makers(self) -> dict[str, Node]:
        """The node that makes each value; inputs have none."""
        return {value.name: node for node in self.nodes for value in node.makes}

    @cached_property
    def written(self) -> frozenset[str]:
        """The values whose memory is written in place: whoever is given one needs a copy of its own."""
        return frozenset(value for group in self.storage if group.writers for value in group.values)

    @cached_property
    def updated(self) -> dict[str, tuple[Node, ...]]:
        """The parameters and buffers that some node writes, each with all nodes that use it, in the graph's order.

        Whoever reads what was written as a value is no such node: values go from stage to stage, state does not.
        """
        names = {self.tensor_of(name) for update in self.updates for name in update.names}
        users: dict[str, dict[str, Node]] = {name: {} for name in names}
        for node in self.nodes:
            for name in map(self.tensor_of, (*node.parameters, *node.buffers)):
                if name in users:
                    users[name][node.name] = node
        return {name: tuple(users[name].values()) for name in sorted(users)}

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Every value that goes from a node to a node, in the order of the readers; inputs are no edges."""
        return tuple(
            Edge(self.makers[value].name, node.name, value)
            for node in self.nodes
            for value in dict.fromkeys(node.reads)
            if value in self.makers
        )

    @cached_property
    def fingerprint(self) -> str:
        """Differs when any name, shape, dtype or need of a gradient differs: what a Profile is measured for."""
        values = [(_shown(value), value.spec.requires_grad) for value in (*self._values(), *self.parameters)]
        wires = [(node.reads, [value.name for value in node.makes]) for node in self.nodes]
        return _digest(self.model_fingerprint, values, wires, self.outputs)

    @cached_property
    def model_fingerprint(self) -> str:
        """The same for every batch: names of nodes, and names, shapes and dtypes of parameters and buffers."""
        nodes = [(node.name, node.kind, node.parameters, node.buffers) for node in self.nodes]
        return _digest(nodes, [_shown(value) for value in (*self.parameters, *self.buffers)], self.tied)

    @cached_property
    def _node_of(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _spec_of(self) -> dict[str, TensorSpec]:
        return {value.name: value.spec for value in self._values()}

    @cached_property
    def _first_name(self) -> dict[str, str]:
        return {name: group[0] for group in self.tied for name in group}


def _check_distinct(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name:
            raise GraphError(f"a {what} without a name")
        if name in seen:
            raise GraphError(f"two of one name: {what}", name=repr(name))
        seen.add(name)


def _check_known(problem: str, names: Iterable[str], known: Container[str], **values: object) -> None:
    for name in names:
        if name not in known:
            raise GraphError(problem, name=repr(name), hint="", **values)


def _shown(value: Value) -> tuple[str, tuple[int, ...], str]:
    return value.name, value.spec.shape, value.spec.dtype


def _digest(*parts: object) -> str:
    # JSON escapes every character that is not ASCII, so that any name at all has its bytes.
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()
