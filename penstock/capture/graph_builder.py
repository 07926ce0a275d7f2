"""Builds the Graph of a record: nodes, values, tied parameters, shared memory; and finds the paths of gradients."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.capture.recorder import CallNote
from penstock.capture.tensor_table import Edge, TensorTable
from penstock.capture.tensors import spec_of, storage_id
from penstock.ir import Call, Graph, Node, Record, StorageGroup, Update, Value, refs


def build_graph(model: nn.Module, record: Record, table: TensorTable, notes: Mapping[str, CallNote]) -> Graph:
    """The graph of a record, with one node for each call."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Values that depend on the inputs of the model and the seed alone. The nodes that make them (masks, positions,
    # rotary tables) are run again by every stage that needs them, instead of sending the values.
    from_inputs = set(record.inputs)
    written = {name for note in notes.values() for name in note.written_state}
    nodes = []
    for call in (step for step in record.steps if isinstance(step, Call)):
        note = notes[call.name]
        node = _build_node(model, call, table, note, parameters.keys())
        is_repeatable = not (
            node.parameters
            # A number for the whole batch is drawn alike by every stage.
            or (note.is_random and not note.is_shared_draw)
            or (call.is_module and node.buffers)
            or written & set(node.buffers)
            or any(value.spec.requires_grad for value in node.makes)
        )
        if is_repeatable and set(node.reads) <= from_inputs:
            node = replace(node, from_inputs=True)
            from_inputs |= {value.name for value in node.makes}
        nodes.append(node)
    return Graph(
        tuple(nodes),
        tuple(Value(name, table.specs[name]) for name in record.inputs),
        tuple(dict.fromkeys(refs(record.outputs))),
        tuple(Value(name, spec_of(tensor)) for name, tensor in parameters.items()),
        tuple(Value(name, spec_of(tensor)) for name, tensor in table.buffers.items()),
        _tied_parameters(parameters),
        _storage_groups(record, table, nodes, notes),
        tuple(Update(name, note.written_state) for name, note in notes.items() if note.written_state),
    )


def _build_node(model: nn.Module, call: Call, table: TensorTable, note: CallNote, parameters: Iterable[str]) -> Node:
    # The names of a module's parameters and buffers, by the first name that each tensor has in the model. The two
    # differ for tied parameters, which keep the name under which this module uses them.
    module_state: dict[str, str] = {}
    if call.is_module:
        block, prefix = model.get_submodule(call.target), f"{call.target}." if call.target else ""
        for name, parameter in block.named_parameters():
            module_state[table.state.get(id(parameter), prefix + name)] = prefix + name
        module_state |= {name: name for buffer in block.buffers() if (name := table.state.get(id(buffer)))}
    written = (name for name in note.written_state if name not in module_state)
    used = tuple(dict.fromkeys((*call.arg_states, *module_state.values(), *written)))
    reads = tuple(dict.fromkeys(call.reads))
    # A block may return one of its arguments: that is not a new value. State among the results has no name.
    fresh = [name for name in dict.fromkeys(call.makes) if name and name not in reads]
    names = set(parameters)
    return Node(
        name=call.name,
        reads=reads,
        makes=tuple(Value(name, table.specs[name]) for name in fresh),
        parameters=tuple(name for name in used if name in names),
        buffers=tuple(name for name in used if name not in names),
        module=note.scope,
        kind=note.kind,
        is_block=call.is_module,
        is_random=note.is_random,
    )


def _tied_parameters(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _storage_groups(
    record: Record, table: TensorTable, nodes: Iterable[Node], notes: Mapping[str, CallNote]
) -> tuple[StorageGroup, ...]:
    """The values that share memory or are written in place, with the calls that write them.

    No cut may separate the members of a group that is written.
    """
    calls = [step for step in record.steps if isinstance(step, Call)]
    # By storage: the values in it, and the calls that write into it.
    groups: dict[int, list[str]] = {}
    for name in (*record.inputs, *(value.name for node in nodes for value in node.makes)):
        groups.setdefault(table.storage[name], []).append(name)
    writers: dict[int, list[str]] = {}
    for call in calls:
        for storage in {table.storage[new] for new, _ in call.writes}:
            writers.setdefault(storage, []).append(call.name)
    for call in calls:
        # A value that is a view of a buffer changes when the buffer is written.
        buffers = [table.buffers[name] for name in notes[call.name].written_state if name in table.buffers]
        for storage in set(map(storage_id, buffers)) & writers.keys():
            writers[storage] = list(dict.fromkeys((*writers[storage], call.name)))
    return tuple(
        StorageGroup(tuple(names), tuple(writers.get(storage, ())))
        for storage, names in groups.items()
        if len(names) > 1 or storage in writers
    )


def outputs_reaching(edges: Mapping[str, Edge], outputs: Iterable[str]) -> dict[str, frozenset[str]]:
    """For each value, the outputs whose backward reaches it.

    `edges` has the values that require a gradient. A loss of other outputs leaves no gradient in a value, not even
    zeros.
    """
    names = [name for name in dict.fromkeys(outputs) if name in edges]
    # A set of outputs is a number with one bit for each, so that one pass over the graph finds all paths.
    reached: dict[Edge, int] = {}
    by_node: dict[Any, int] = {}
    for index, name in enumerate(names):
        node, number = edges[name]
        reached[node, number] = reached.get((node, number), 0) | 1 << index
        by_node[node] = by_node.get(node, 0) | 1 << index
    for node in _backward_order(by_node):
        bits = by_node[node]
        for following, number in node.next_functions:
            if following is not None:
                reached[following, number] = reached.get((following, number), 0) | bits
                by_node[following] = by_node.get(following, 0) | bits
    sets: dict[int, frozenset[str]] = {}
    for bits in {reached.get(edge, 0) for edge in edges.values()}:
        sets[bits] = frozenset(name for index, name in enumerate(names) if bits >> index & 1)
    return {name: sets[reached.get(edge, 0)] for name, edge in edges.items()}


def _backward_order(roots: Iterable[Any]) -> list[Any]:
    """All nodes of autograd's graph in the order of backward: each after all nodes that pass it a gradient."""
    finished: list[Any] = []
    seen: set[Any] = set()
    # A depth-first search finishes a node after the nodes that it passes gradients to; reversed, it comes before them.
    for root in roots:
        # Without recursion: the graph may be deeper than Python's stack.
        stack = [(root, False)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                finished.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += ((following, False) for following, _ in node.next_functions if following is not None)
    return finished[::-1]
