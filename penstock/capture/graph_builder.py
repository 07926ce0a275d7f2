"""Builds the Graph of a record: nodes, values, tied parameters, shared memory."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from penstock.capture.recorder import CallNote
from penstock.capture.tensor_table import TensorTable, spec_of, storage_id
from penstock.ir import Call, Graph, Node, Record, StorageGroup, Update, Value, refs, states


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
    module_state = _state_names(model, call.target, table) if call.is_module else {}
    written = (name for name in note.written_state if name not in module_state)
    used = tuple(dict.fromkeys((*states(call.args), *states(call.kwargs), *module_state.values(), *written)))
    reads = tuple(dict.fromkeys((*refs(call.args), *refs(call.kwargs), *(old for _, old in call.writes))))
    made = dict.fromkeys((*(new for new, _ in (*call.writes, *call.results.updates)), *call.results.values))
    # A leaf may return one of its arguments: that is not a new value. State among the results has no name.
    fresh = [name for name in made if name and name not in reads]
    names = set(parameters)
    return Node(
        call.name,
        reads,
        tuple(Value(name, table.specs[name]) for name in fresh),
        tuple(name for name in used if name in names),
        tuple(name for name in used if name not in names),
        False,
        note.scope,
        note.kind,
        call.is_module,
        note.is_random,
    )


def _state_names(model: nn.Module, path: str, table: TensorTable) -> dict[str, str]:
    """The names of a module's parameters and buffers, by the first name that each tensor has in the model.

    The two differ for tied parameters, which keep the name under which this module uses them.
    """
    leaf = model.get_submodule(path)
    prefix = f"{path}." if path else ""
    names = {table.state.get(id(tensor), prefix + name): prefix + name for name, tensor in leaf.named_parameters()}
    return names | {name: name for buffer in leaf.buffers() if (name := table.state.get(id(buffer)))}


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
