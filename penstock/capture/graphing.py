"""Graphing: the Graph noun of a record."""

from collections.abc import Iterable, Mapping

from torch import nn

from penstock.capture.book import Book, spec_of
from penstock.capture.recorder import Note
from penstock.ir.graph import Graph, Node, StorageGroup, Value
from penstock.ir.record import Call, Record, refs, states


def graph_of(model: nn.Module, record: Record, book: Book, notes: Mapping[str, Note]) -> Graph:
    """Nodes are the calls; values, parameters and buffers go by their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = book.others
    calls = [step for step in record.steps if isinstance(step, Call)]
    free = set(record.inputs)
    written = {name for note in notes.values() for name in note.written_state}
    nodes = []
    for call in calls:
        node = _node(model, call, book, notes[call.name], set(parameters))
        if _is_free(node, notes[call.name], call, free, written):
            node = Node(node.name, node.reads, node.makes, (), node.buffers, True, node.module, node.kind)
            free |= {value.name for value in node.makes}
        nodes.append(node)
    return Graph(
        tuple(nodes),
        tuple(Value(name, book.specs[name]) for name in record.inputs),
        tuple(dict.fromkeys(refs(record.outputs))),
        tuple(Value(name, spec_of(tensor)) for name, tensor in parameters.items()),
        tuple(Value(name, spec_of(tensor)) for name, tensor in buffers.items()),
        _tied(parameters),
        _storage(calls, book, record.inputs, nodes),
    )


def _node(model: nn.Module, call: Call, book: Book, note: Note, parameters: set[str]) -> Node:
    used = list(dict.fromkeys((*states(call.args), *states(call.kwargs))))
    if call.is_module:
        leaf = model.get_submodule(call.target)
        prefix = f"{call.target}." if call.target else ""
        used += [prefix + name for name, _ in (*leaf.named_parameters(), *leaf.named_buffers())]
    reads = tuple(dict.fromkeys((*refs(call.args), *refs(call.kwargs), *(old for _, old in call.writes))))
    made = dict.fromkeys((*(new for new, _ in call.writes), *call.results.values))
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
    )


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


def _storage(
    calls: Iterable[Call], book: Book, inputs: Iterable[str], nodes: Iterable[Node]
) -> tuple[StorageGroup, ...]:
    groups: dict[int, list[str]] = {}
    for name in (*inputs, *(value.name for node in nodes for value in node.makes)):
        groups.setdefault(book.memory[name], []).append(name)
    writers: dict[int, list[str]] = {}
    for call in calls:
        for memory in {book.memory[new] for new, _ in call.writes}:
            writers.setdefault(memory, []).append(call.name)
    return tuple(
        StorageGroup(tuple(names), tuple(writers.get(memory, ())))
        for memory, names in groups.items()
        if len(names) > 1 or memory in writers
    )
