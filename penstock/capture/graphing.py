"""Graphing: the Graph noun of a record."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn

from penstock.capture.book import Book, memory_of, spec_of
from penstock.capture.recorder import Note
from penstock.ir import Call, Graph, Node, Record, StorageGroup, Update, Value, refs, states


def graph_of(model: nn.Module, record: Record, book: Book, notes: Mapping[str, Note]) -> Graph:
    """Nodes are the calls; values, parameters and buffers go by their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = book.others
    free = set(record.inputs)
    written = {name for note in notes.values() for name in note.written_state}
    nodes = []
    for call in (step for step in record.steps if isinstance(step, Call)):
        node = _node(model, call, book, notes[call.name], set(parameters))
        if _is_free(node, notes[call.name], call, free, written):
            node = replace(node, parameters=(), from_inputs=True)
            free |= {value.name for value in node.makes}
        nodes.append(node)
    return Graph(
        tuple(nodes),
        tuple(Value(name, book.specs[name]) for name in record.inputs),
        tuple(dict.fromkeys(refs(record.outputs))),
        tuple(Value(name, spec_of(tensor)) for name, tensor in parameters.items()),
        tuple(Value(name, spec_of(tensor)) for name, tensor in buffers.items()),
        _tied(parameters),
        _storage(record, book, nodes, notes),
        tuple(Update(name, note.written_state) for name, note in notes.items() if note.written_state),
    )


def _node(model: nn.Module, call: Call, book: Book, note: Note, parameters: set[str]) -> Node:
    own = _own_names(model, call.target, book) if call.is_module else {}
    written = (name for name in note.written_state if name not in own)
    used = tuple(dict.fromkeys((*states(call.args), *states(call.kwargs), *own.values(), *written)))
    reads = tuple(dict.fromkeys((*refs(call.args), *refs(call.kwargs), *(old for _, old in call.writes))))
    made = dict.fromkeys((*(new for new, _ in (*call.writes, *call.results.updates)), *call.results.values))
    fresh = [name for name in made if name and name not in reads]
    return Node(
        call.name,
        reads,
        tuple(Value(name, book.specs[name]) for name in fresh),
        tuple(name for name in used if name in parameters),
        tuple(name for name in used if name not in parameters),
        False,
        note.scope,
        note.kind,
        call.is_module,
        note.is_random,
    )


def _own_names(model: nn.Module, path: str, book: Book) -> dict[str, str]:
    """The parameters and buffers of a module by the first name of each tensor; tied parameters keep their own."""
    leaf = model.get_submodule(path)
    prefix = f"{path}." if path else ""
    found = {book.state.get(id(tensor), prefix + name): prefix + name for name, tensor in leaf.named_parameters()}
    return found | {name: name for buffer in leaf.buffers() if (name := book.state.get(id(buffer)))}


def _is_free(node: Node, note: Note, call: Call, free: set[str], written: set[str]) -> bool:
    """Whether a node depends on the inputs of the model only, and gives the same wherever it runs."""
    if node.parameters or note.is_random or (call.is_module and node.buffers) or written & set(node.buffers):
        return False
    return set(node.reads) <= free and not any(value.spec.requires_grad for value in node.makes)


def _tied(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _storage(record: Record, book: Book, nodes: Iterable[Node], notes: Mapping[str, Note]) -> tuple[StorageGroup, ...]:
    calls = [step for step in record.steps if isinstance(step, Call)]
    groups: dict[int, list[str]] = {}
    for name in (*record.inputs, *(value.name for node in nodes for value in node.makes)):
        groups.setdefault(book.memory[name], []).append(name)
    writers: dict[int, list[str]] = {}
    for call in calls:
        for memory in {book.memory[new] for new, _ in call.writes}:
            writers.setdefault(memory, []).append(call.name)
    for call in calls:
        # Values that look into a buffer are changed by whoever writes it.
        buffers = [book.others[name] for name in notes[call.name].written_state if name in book.others]
        for memory in set(map(memory_of, buffers)) & writers.keys():
            writers[memory] = list(dict.fromkeys((*writers[memory], call.name)))
    return tuple(
        StorageGroup(tuple(names), tuple(writers.get(memory, ())))
        for memory, names in groups.items()
        if len(names) > 1 or memory in writers
    )
