"""Kinship: which nodes of a model do the same work, so that measuring a few of them is enough."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from penstock.ir import Call, Container, Graph, Node, ObjectRef, Ref, State, Tree
from penstock.measure.form import Forms
from penstock.measure.memory import Memory
from penstock.measure.subject import Subject


def families(subject: Subject) -> list[list[Node]]:
    """The nodes in groups of those that are the same call of a module or function of the same form.

    The same are code, settings, modes, sizes and types of all that goes in and comes out, and what shares memory. Only
    which of many it is, as a layer's own number, does not count. What depends on the numbers themselves cannot be seen.
    """
    forms, groups = Forms(with_places=False), dict[str, list[Node]]()
    for node in subject.graph.nodes:
        groups.setdefault(form_of(subject, node, forms), []).append(node)
    return list(groups.values())


def told_of(memory: Memory, one: Node, other: Node) -> Memory:
    """The memory of one node, told of another of its family."""
    names = dict(zip(_values(one), _values(other), strict=True))
    holds = replace(
        memory.holds,
        values=tuple(names[name] for name in memory.holds.values),
        late_values=tuple(names[name] for name in memory.holds.late_values),
        late_gradients=tuple(names[name] for name in memory.holds.late_gradients),
    )
    return memory._replace(holds=holds)


def form_of(subject: Subject, node: Node, forms: Forms) -> str:
    """All that the work of a node depends on, but for the numbers."""
    graph, call = subject.graph, subject.calls[node.name]
    names = _values(node)
    target = (
        forms.of(subject.model.get_submodule(call.target)) if call.is_module else forms.value(subject.live[call.target])
    )
    places = {name: place for place, name in enumerate(names)}
    return repr(
        (
            call.is_module,
            target,
            [graph.spec(name) for name in names],
            _sharing(graph, names),
            [_tree(tree, places, subject, forms) for tree in (call.args, call.kwargs)],
            _signs(call),
            node.from_inputs,
        )
    )


def _values(node: Node) -> tuple[str, ...]:
    return (*node.reads, *(value.name for value in node.makes))


def _signs(call: Call) -> tuple[Any, ...]:
    return call.results.structure, len(call.results.values), len(call.results.updates), len(call.writes), call.context


def _sharing(graph: Graph, names: Iterable[str]) -> list[int]:
    """Equal numbers for values that share memory, and whether that is an input's or is written."""
    group_of = {name: place for place, group in enumerate(graph.storage) for name in group.values}
    seen: dict[int, int] = {}
    found = []
    for place, name in enumerate(names):
        group = group_of.get(name, -1 - place)
        found.append(seen.setdefault(group, place) * 2 + (name in graph.written))
    return found


def _tree(tree: Tree, places: Mapping[str, int], subject: Subject, forms: Forms) -> Any:
    """Arguments with values by their places, and parameters by their form."""
    if isinstance(tree, Ref):
        return "value", places.get(tree.value)
    if isinstance(tree, State):
        path, _, name = tree.name.rpartition(".")
        return "state", forms.value(getattr(subject.model.get_submodule(path), name, None))
    if isinstance(tree, ObjectRef):
        return "live", forms.value(subject.live[tree.key])
    if isinstance(tree, Container):
        kind = forms.value(subject.live[tree.kind])
        return kind, *(_tree(part, places, subject, forms) for part in (*tree.keys, *tree.items))
    return repr(tree)
