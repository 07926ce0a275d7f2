"""Flow: a graph with its stages as parts in the order of reading, and the wires between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.ir import Crossing, Graph, Node, Partition, TensorSpec, Value, bytes_text
from penstock.views.base import Staged, staged
from penstock.views.parts import Part, Weight, gathered, glued, shown, weight
from penstock.views.repeats import collapsed

UNREAD = "read by no other part"


class Wire(NamedTuple):
    """Values of one part that go to the same other parts; `targets` are places, one past the last for the outputs."""

    source: int
    targets: tuple[int, ...]
    values: tuple[Value, ...]

    @property
    def text(self) -> str:
        """What the values are and their bytes."""
        return sizes_text(self.values)


@dataclass(frozen=True)
class Flow:
    """Parts by stage, those that depend on inputs only before their first reader."""

    graph: Graph
    partition: Partition
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, subject: Staged, alike: int) -> "Flow":
        """The flow with functions merged, and so many or more like parts in a row; with 0, every node by itself."""
        graph, partition = staged(subject)
        free, others = gathered(graph, partition)
        if alike:
            free, others = collapsed(graph, glued(free, graph), glued(others, graph), alike)
        return cls(graph, partition, _joined(graph, free, others))

    @property
    def outputs(self) -> int:
        """The place that stands for whoever reads the outputs."""
        return len(self.parts)

    @cached_property
    def place(self) -> dict[str, int]:
        """The place of the part of each node."""
        return {node.name: number for number, part in enumerate(self.parts) for node in part.nodes}

    @cached_property
    def wires(self) -> tuple[Wire, ...]:
        """The values that leave a part, gathered by their readers."""
        targets: dict[str, set[int]] = {}
        for edge in self.graph.edges:
            if self.place[edge.producer] != self.place[edge.consumer]:
                targets.setdefault(edge.value, set()).add(self.place[edge.consumer])
        for value in self.graph.outputs:
            if value in self.graph.makers:
                targets.setdefault(value, set()).add(self.outputs)
        found: dict[tuple[int, tuple[int, ...]], list[Value]] = {}
        for name, places in targets.items():
            key = (self.place[self.graph.makers[name].name], tuple(sorted(places)))
            found.setdefault(key, []).append(Value(name, self.graph.spec(name)))
        return tuple(Wire(*key, tuple(values)) for key, values in sorted(found.items()))

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """What crosses the cuts."""
        return self.partition.crossings(self.graph)

    @cached_property
    def runs(self) -> tuple[frozenset[str], ...]:
        """The names of the nodes that every stage runs."""
        return tuple(frozenset(node.name for node in nodes) for nodes in self.partition.runs(self.graph))

    def stages_of(self, part: Part) -> tuple[int, ...]:
        """The stages that run the part: one, unless it depends on inputs only."""
        if not part.is_free:
            return (part.stage,)
        return tuple(stage for stage, names in enumerate(self.runs) if any(node.name in names for node in part.nodes))

    def inputs_of(self, part: Part) -> tuple[Value, ...]:
        """The inputs of the graph that the part reads."""
        read = {value for node in part.nodes for value in node.reads}
        return tuple(value for value in self.graph.inputs if value.name in read)

    def captions(self, place: int) -> tuple[str, ...]:
        """The lines of text in the box of a part."""
        part = self.parts[place]
        scope = f" in {shown(part.nodes[0].module)}" if part.nodes[0].module else ""
        what = f"{part.kind}{scope}" if part.is_glue else part.title
        makes = ", ".join(wire.text for wire in self.wires if wire.source == place)
        if part.is_free:
            reads = ", ".join(shown(value.name) for value in self.inputs_of(part))
            return what, " -> ".join(filter(None, (reads, makes or UNREAD)))
        if part.is_glue:
            return (what if makes else f"{what}, {UNREAD}",)
        weight = self.weight(part.first)
        each = f", {'each ' if part.times > 1 else ''}{weight}" if weight.num_parameters else ""
        return what, part.kind + each

    def weight(self, nodes: Sequence[Node]) -> Weight:
        """The distinct parameters of the nodes."""
        return weight(nodes, self.graph, self._parameters)

    @cached_property
    def _parameters(self) -> dict[str, TensorSpec]:
        return {value.name: value.spec for value in self.graph.parameters}


def sizes_text(values: Sequence[Value]) -> str:
    """`2 × float32[4, 8], 256 B`: what the values are, and their bytes together."""
    specs = {str(value.spec) for value in values}
    what = specs.pop() if len(specs) == 1 else f"{len(values)} tensors"
    total = bytes_text(sum(value.spec.bytes for value in values))
    return f"{len(values)} × {what}, {total}" if len(values) > 1 and "[" in what else f"{what}, {total}"


def _joined(graph: Graph, free: Sequence[Part], others: Sequence[Part]) -> tuple[Part, ...]:
    """All parts: those that depend on inputs only as late as their first reader allows, and never after it."""
    place = {node.name: number for number, part in enumerate(others) for node in part.nodes}
    readers: dict[str, int] = {}
    for node in reversed(graph.nodes):
        reader = place[node.name] if not node.from_inputs else readers.get(node.name, len(others))
        for value in node.reads:
            if value in graph.makers and graph.makers[value].from_inputs:
                maker = graph.makers[value].name
                readers[maker] = min(reader, readers.get(maker, reader))
    last = len(others)
    keyed = [((min(readers.get(node.name, last) for node in part.nodes), 0), part) for part in free]
    keyed += [((number, 1), part) for number, part in enumerate(others)]
    return tuple(part for _, part in sorted(keyed, key=lambda pair: pair[0]))
