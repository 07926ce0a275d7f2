"""The model as a Graph of named nodes and the values between them."""

import hashlib
import json
import math
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from penstock.errors import GraphError
from penstock.ir.dtypes import FLOATING_POINT, INTEGERS, ITEM_BYTES

ADDED_LOSS = "added_loss"
"""kind of the node by which a model adds a term to its loss"""


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of a tensor; `dtype` is torch's name without `torch.`."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = False
    order: tuple[int, ...] = ()
    """the dimensions in memory order, outermost first; empty if contiguous in their own order"""

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise GraphError("unknown dtype", dtype=repr(self.dtype), hint="a name such as float32, bfloat16 or int64")
        if any(size < 0 for size in self.shape):
            raise GraphError("sizes of a shape must be 0 or more", shape=self.shape)
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            raise GraphError("an order must name every dimension once", order=self.order, shape=self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def is_floating_point(self) -> bool:
        """Whether the entries are rounded real numbers; not for complex numbers."""
        return self.dtype in FLOATING_POINT

    @property
    def is_integer(self) -> bool:
        """Whether the entries are integers, as token ids and labels are; not for bool, nor for quantized numbers."""
        return self.dtype in INTEGERS

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Value:
    """A tensor with a name: an input, the result of a node, a parameter or a buffer."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True)
class Node:
    """One call of the model: of a block, or of a function between blocks.

    `reads` names inputs of the graph and values of earlier nodes; parameters and buffers have their original names.
    """

    name: str
    reads: tuple[str, ...]
    makes: tuple[Value, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    from_inputs: bool = False
    """depends on the inputs of the graph only, such as a mask: every stage that reads it recomputes it"""
    module: str = ""
    """the module whose call this is, or in whose forward it happens, by its original name"""
    kind: str = ""
    """the class of the module, or the name of the function"""
    is_block: bool = False
    """whether this is the call of a block: a module that stays whole"""
    is_random: bool = False
    """draws random numbers, as dropout does"""


@dataclass(frozen=True)
class StorageGroup:
    """Values that share storage, and the nodes that write into it in place."""

    values: tuple[str, ...]
    writers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Update:
    """Parameters and buffers that a node writes, such as the running mean of a batch norm."""

    node: str
    names: tuple[str, ...]


class Edge(NamedTuple):
    """A value that one node makes and another reads."""

    producer: str
    consumer: str
    value: str


@dataclass(frozen=True)
class Graph:
    """A model: its nodes in topological order, and the values that they read and make.

    Every name of a parameter is listed, also several names of one tensor, which `tied` groups. `outputs` names the
    values that the model returns, which may include inputs.
    """

    nodes: tuple[Node, ...]
    """calls in topological order"""
    inputs: tuple[Value, ...]
    """the model's tensor arguments"""
    outputs: tuple[str, ...]
    """names of the values that the model returns"""
    parameters: tuple[Value, ...] = ()
    """by original name, tied ones under each name"""
    buffers: tuple[Value, ...] = ()
    """by original name"""
    tied: tuple[tuple[str, ...], ...] = ()
    """groups of parameter names that are one tensor"""
    storage: tuple[StorageGroup, ...] = ()
    """values that share memory, and the nodes that write into it"""
    updates: tuple[Update, ...] = ()
    """parameters and buffers that the forward writes"""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise GraphError("a graph must have nodes")
        _check_distinct("node", (node.name for node in self.nodes))
        _check_distinct("value", (value.name for value in self._values()))
        _check_distinct("parameter or buffer", (value.name for value in (*self.parameters, *self.buffers)))
        _check_distinct("tied parameter", (name for group in self.tied for name in group))
        _check_distinct("value in a storage group", (name for group in self.storage for name in group.values))
        known = {value.name for value in self.inputs}
        from_inputs = set(known)
        for node in self.nodes:
            _check_known("a node reads a value that no earlier node makes", node.reads, known, node=node.name)
            if node.from_inputs:
                _check_known(
                    "a node marked from_inputs must read values from inputs only",
                    node.reads,
                    from_inputs,
                    node=node.name,
                )
                from_inputs.update(value.name for value in node.makes)
            known.update(value.name for value in node.makes)
        _check_known("no node makes this output", self.outputs, known)
        state = {value.name: (value.spec.shape, value.spec.dtype) for value in (*self.parameters, *self.buffers)}
        for node in self.nodes:
            names = (*node.parameters, *node.buffers)
            _check_known("a node uses a parameter or buffer that the graph does not list", names, state, node=node.name)
        for tied in self.tied:
            _check_known("a tied parameter that the graph does not list", tied, state)
            if len({state[name] for name in tied}) > 1:
                raise GraphError("tied parameters differ in shape or dtype", names=tied)
        for group in self.storage:
            _check_known("a storage group names a value that the graph does not have", group.values, self._spec_of)
            _check_known("a storage group names a writer that the graph does not have", group.writers, self._node_of)
        for update in self.updates:
            node = self[update.node]
            own = {self.tensor_of(name) for name in (*node.parameters, *node.buffers)}
            written = map(self.tensor_of, update.names)
            _check_known("a node writes a parameter or buffer that it does not use", written, own, node=node.name)

    def _values(self) -> Iterator[Value]:
        yield from self.inputs
        for node in self.nodes:
            yield from node.makes

    def __getitem__(self, name: str) -> Node:
        _check_known("no such node", (name,), self._node_of)
        return self._node_of[name]

    def spec(self, value: str) -> TensorSpec:
        """The spec of an input or of a value that a node makes."""
        _check_known("no such value", (value,), self._spec_of)
        return self._spec_of[value]

    def tensor_of(self, parameter: str) -> str:
        """The canonical name of the tensor: the first of its tied names, or its own."""
        return self._first_name.get(parameter, parameter)

    def storage_of(self, value: str) -> str:
        """The canonical name of the memory of a value: the first of the values that share it, or its own."""
        return self._first_in_storage.get(value, value)

    @cached_property
    def makers(self) -> dict[str, Node]:
        """The node that makes each value; inputs have none."""
        return {value.name: node for node in self.nodes for value in node.makes}

    @cached_property
    def written(self) -> frozenset[str]:
        """The values whose storage is written in place, so that a reader on another stage needs a copy."""
        return frozenset(value for group in self.storage if group.writers for value in group.values)

    @cached_property
    def updated(self) -> dict[str, tuple[Node, ...]]:
        """The parameters and buffers that some node writes, each with all nodes that use it, in the graph's order.

        A node that reads the written tensor as a value does not count: values are sent between stages, state is not.
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
        """Every value that one node makes and another reads, in the order of the readers; inputs are not included."""
        return tuple(
            Edge(self.makers[value].name, node.name, value)
            for node in self.nodes
            for value in dict.fromkeys(node.reads)
            if value in self.makers
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all names, shapes, dtypes and requires_grad: identifies the graph that a Profile was measured for."""
        values = [(_signature(value), value.spec.requires_grad) for value in (*self._values(), *self.parameters)]
        edges = [(node.reads, [value.name for value in node.makes]) for node in self.nodes]
        return _digest(self.model_fingerprint, values, edges, self.outputs)

    @cached_property
    def model_fingerprint(self) -> str:
        """Hash that is the same for every batch: names of nodes; names, shapes and dtypes of parameters, buffers."""
        nodes = [(node.name, node.kind, node.parameters, node.buffers) for node in self.nodes]
        return _digest(nodes, [_signature(value) for value in (*self.parameters, *self.buffers)], self.tied)

    @cached_property
    def _node_of(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _spec_of(self) -> dict[str, TensorSpec]:
        return {value.name: value.spec for value in self._values()}

    @cached_property
    def _first_name(self) -> dict[str, str]:
        return {name: group[0] for group in self.tied for name in group}

    @cached_property
    def _first_in_storage(self) -> dict[str, str]:
        return {name: group.values[0] for group in self.storage for name in group.values}


def _check_distinct(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name:
            raise GraphError(f"a {what} must have a name")
        if name in seen:
            raise GraphError(f"duplicate {what}", name=repr(name))
        seen.add(name)


def _check_known(problem: str, names: Iterable[str], known: Container[str], **values: object) -> None:
    for name in names:
        if name not in known:
            raise GraphError(problem, name=repr(name), hint="", **values)


def _signature(value: Value) -> tuple[str, tuple[int, ...], str]:
    return value.name, value.spec.shape, value.spec.dtype


def _digest(*parts: object) -> str:
    # JSON escapes all characters outside ASCII, so every name can be encoded, lone surrogates included.
    return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()


def prune_gradients(graph: Graph, roots: Collection[str], adding: Collection[str] = ()) -> Graph:
    """The graph with requires_grad only on values from which the loss can be reached.

    `roots` are the values that the loss is computed from, `adding` the nodes that add a term to it. A node is taken to
    use everything that it reads. A value without a path to the loss keeps its data, but a gradient sent for it would be
    a zero that unsplit training never makes.
    """
    live = set(roots)
    for node in reversed(graph.nodes):
        is_live = any(value.name in live and value.spec.requires_grad for value in node.makes)
        if is_live or node.name in adding:
            live.update(node.reads)

    def pruned(value: Value) -> Value:
        if value.name in live or not value.spec.requires_grad:
            return value
        return Value(value.name, replace(value.spec, requires_grad=False))

    return replace(graph, nodes=tuple(replace(node, makes=tuple(map(pruned, node.makes))) for node in graph.nodes))
