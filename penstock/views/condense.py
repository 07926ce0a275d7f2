"""A graph condensed for display: nodes grouped into modules, the functions between them, and runs of equal parts."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import NamedTuple

from penstock.errors import ViewError
from penstock.ir import Crossing, Graph, Node, Partition, TensorSpec, Value, bytes_text, count_text
from penstock.views.base import Staged, graph_and_partition, short_name

DOTS = " … "
MAX_PERIOD = 64
"""the most parts of one repetition"""
LONG_PERIOD = 12
"""a repetition of this many parts is collapsed even if it occurs only twice"""
OUTPUT = -1
"""the reader of the graph's outputs, in sets of readers"""


class ParameterSize(NamedTuple):
    """The distinct parameters of some nodes."""

    num_parameters: int
    bytes: int

    def __str__(self) -> str:
        word = "parameter" if self.num_parameters == 1 else "parameters"
        return f"{count_text(self.num_parameters)} {word}, {bytes_text(self.bytes)}"


class NodeGroup(NamedTuple):
    """Nodes that are shown as one: a module, functions between modules, or several repetitions of these."""

    nodes: tuple[Node, ...]
    stage: int
    times: int = 1
    """number of repetitions in a row"""

    @property
    def from_inputs(self) -> bool:
        """Whether it depends on the model's inputs only, so that every stage that reads it computes it itself."""
        return all(node.from_inputs for node in self.nodes)

    @property
    def is_glue(self) -> bool:
        """Whether it consists of functions between modules: code of the model's own forward."""
        return self.times == 1 and not any(map(is_block, self.nodes))

    @property
    def first(self) -> tuple[Node, ...]:
        """The nodes of the first repetition."""
        return self.nodes[: len(self.nodes) // self.times]

    @property
    def last(self) -> tuple[Node, ...]:
        """The nodes of the last repetition."""
        return self.nodes[-(len(self.nodes) // self.times) :]

    @property
    def title(self) -> str:
        """The name, or the first and the last name of several."""
        if self.times > 1:
            return f"{_common_name(self.first)}{DOTS}{_common_name(self.last)}"
        first, last = self.nodes[0], self.nodes[-1]
        if len(self.nodes) == 1:
            return short_name(first.name)
        return f"{short_name(first.name)}{DOTS}{short_name(last.name.removeprefix(f'{last.module}/'))}"

    @property
    def kind(self) -> str:
        """The class of a module or the number of functions, with the number of repetitions."""
        if self.times > 1:
            kind = _kind(self.first[0]) if len(self.first) == 1 else f"{len(self.first)} nodes"
            return f"{self.times} × {kind}"
        if is_block(self.nodes[0]):
            return _kind(self.nodes[0])
        return f"glue: {len(self.nodes)} functions" if len(self.nodes) > 1 else f"glue: {_kind(self.nodes[0])}"


class Connection(NamedTuple):
    """Values of one part that the same other parts read."""

    source: int
    targets: tuple[int, ...]
    """indices of parts, in order; one past the last stands for the outputs of the graph"""
    values: tuple[Value, ...]


@dataclass(frozen=True)
class CondensedGraph:
    """A graph with its partition, as parts in order of stages; parts from inputs only precede their first reader."""

    graph: Graph
    partition: Partition
    parts: tuple[NodeGroup, ...]

    @classmethod
    def of(cls, subject: Staged, collapse: int) -> "CondensedGraph":
        """Groups functions, and runs of at least `collapse` equal parts; with 0 every node is a part."""
        graph, partition = graph_and_partition(subject)
        parts = [NodeGroup((node,), partition.stage_of(node.name)) for node in graph.nodes]
        # Parts that depend on inputs only run on every stage that reads them, so they are in no stage's sequence and
        # are grouped on their own.
        input_only = [part for part in parts if part.from_inputs]
        others = sorted((part for part in parts if not part.from_inputs), key=lambda part: part.stage)
        if collapse:
            input_only, others = (
                _collapse_runs(_group_functions(side, graph), graph, collapse) for side in (input_only, others)
            )
        return cls(graph, partition, _interleave(graph, input_only, others))

    @property
    def outputs(self) -> int:
        """The index that stands for the outputs of the graph in `Connection.targets`."""
        return len(self.parts)

    @cached_property
    def part_of(self) -> dict[str, int]:
        """The index of the part of each node."""
        return {node.name: number for number, part in enumerate(self.parts) for node in part.nodes}

    @cached_property
    def connections(self) -> tuple[Connection, ...]:
        """The values that leave a part, grouped by their readers."""
        targets: dict[str, set[int]] = {}
        for edge in self.graph.edges:
            if self.part_of[edge.producer] != self.part_of[edge.consumer]:
                targets.setdefault(edge.value, set()).add(self.part_of[edge.consumer])
        for value in self.graph.outputs:
            if value in self.graph.makers:
                targets.setdefault(value, set()).add(self.outputs)
        found: dict[tuple[int, tuple[int, ...]], list[Value]] = {}
        for name, readers in targets.items():
            key = (self.part_of[self.graph.makers[name].name], tuple(sorted(readers)))
            found.setdefault(key, []).append(Value(name, self.graph.spec(name)))
        return tuple(Connection(*key, tuple(values)) for key, values in sorted(found.items()))

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """The values that cross from stage to stage."""
        return self.partition.crossings(self.graph)

    @cached_property
    def _runs(self) -> tuple[frozenset[str], ...]:
        return tuple(frozenset(node.name for node in nodes) for nodes in self.partition.runs(self.graph))

    def stages_of(self, part: NodeGroup) -> tuple[int, ...]:
        """The stages that run the part: one, unless it depends on inputs only."""
        if not part.from_inputs:
            return (part.stage,)
        return tuple(stage for stage, names in enumerate(self._runs) if any(node.name in names for node in part.nodes))

    def parameter_size(self, nodes: Iterable[Node]) -> ParameterSize:
        """The parameters of the nodes, a tied one counted once."""
        names = {self.graph.tensor_of(name) for node in nodes for name in node.parameters}
        specs = [self._parameters[name] for name in names]
        return ParameterSize(sum(math.prod(spec.shape) for spec in specs), sum(spec.bytes for spec in specs))

    @cached_property
    def _parameters(self) -> dict[str, TensorSpec]:
        return {value.name: value.spec for value in self.graph.parameters}


def values_text(values: Sequence[Value]) -> str:
    """`2 × float32[4, 8], 256 B`: type and shape of the values, and their bytes together."""
    specs = {str(value.spec) for value in values}
    what = specs.pop() if len(specs) == 1 else f"{len(values)} tensors"
    total = bytes_text(sum(value.spec.bytes for value in values))
    return f"{len(values)} × {what}, {total}" if len(values) > 1 and "[" in what else f"{what}, {total}"


def is_block(node: Node) -> bool:
    """Whether the node is the call of a whole module, or a function with parameters of its own."""
    return bool(node.parameters) or not node.name.startswith(f"{node.module}/")


def check_collapse(collapse: int) -> None:
    """Raise ViewError for a number of equal parts that cannot be collapsed."""
    if collapse < 0 or collapse == 1:
        raise ViewError("collapse must be 0 or at least 2", collapse=collapse, hint="collapse=0 shows every node")


def _kind(node: Node) -> str:
    return short_name(node.kind) or "node"


def _common_name(nodes: tuple[Node, ...]) -> str:
    """The module that contains all nodes if it is an element of a list, or else the first module among them."""
    if len(nodes) == 1:
        return short_name(nodes[0].name)
    common = []
    for words in zip(*(node.module.split(".") for node in nodes), strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    block = next((node for node in nodes if is_block(node)), nodes[0])
    return short_name(".".join(common) if any(word.isdigit() for word in common) else block.name)


def _group_functions(parts: Iterable[NodeGroup], graph: Graph) -> list[NodeGroup]:
    """Merges the functions of one module that no block separates."""
    counts = accumulate(not node.from_inputs and is_block(node) for node in graph.nodes)
    blocks_before = {node.name: count for node, count in zip(graph.nodes, counts, strict=True)}

    def key(part: NodeGroup) -> tuple[int, int, str, str]:
        node = part.nodes[0]
        stage = -1 if node.from_inputs else part.stage
        return stage, blocks_before[node.name], node.module, node.name if is_block(node) else ""

    merged = []
    for _, group in groupby(parts, key=key):
        found = list(group)
        merged.append(NodeGroup(tuple(node for part in found for node in part.nodes), found[0].stage))
    return merged


def _interleave(graph: Graph, input_only: Sequence[NodeGroup], others: Sequence[NodeGroup]) -> tuple[NodeGroup, ...]:
    """All parts, with those that depend on inputs only right before their first reader."""
    place = {node.name: number for number, part in enumerate(others) for node in part.nodes}
    first_reader: dict[str, int] = {}
    # Backward through the graph, as a part may be read by another that depends on inputs only.
    for node in reversed(graph.nodes):
        reader = place[node.name] if not node.from_inputs else first_reader.get(node.name, len(others))
        for value in node.reads:
            if value in graph.makers and graph.makers[value].from_inputs:
                maker = graph.makers[value].name
                first_reader[maker] = min(reader, first_reader.get(maker, reader))
    last = len(others)
    keyed = [((min(first_reader.get(node.name, last) for node in part.nodes), 0), part) for part in input_only]
    keyed += [((number, 1), part) for number, part in enumerate(others)]
    return tuple(part for _, part in sorted(keyed, key=lambda pair: pair[0]))


# ---------------------------------------------------------------------------------------------- runs of equal parts


def _collapse_runs(parts: Sequence[NodeGroup], graph: Graph, least: int) -> list[NodeGroup]:
    """Replaces at least `least` repetitions of one part, or of several, by one part.

    Parts are equal if their nodes have the same classes, parameters and results, and if they read from and are read
    by the same parts, or by parts at the same distance. So no connection is lost: one that leaves a run in the middle,
    as the skips of a U-Net do, keeps the run apart.
    """
    specs = {value.name: value.spec for value in (*graph.parameters, *graph.buffers)}
    signatures = [_signature(part, graph, specs) for part in parts]
    sources, readers = _neighbours(parts, graph)

    def is_equal(one: int, other: int) -> bool:
        if signatures[one] != signatures[other]:
            return False
        if parts[one].from_inputs:
            return True  # nothing is drawn between parts that depend on inputs only
        if len(sources[one]) != len(sources[other]):
            return False
        if not all(a == b or one - a == other - b for a, b in zip(sources[one], sources[other], strict=True)):
            return False
        # Readers that both have in common, such as the sum of all layers, do not tell the parts apart.
        pairs = zip(readers[one], readers[other], strict=True)
        return all({a - one for a in old - new} == {b - other for b in new - old} for old, new in pairs)

    collapsed, place = [], 0
    while place < len(parts):
        # Of all periods that repeat from here on, the one that covers most parts.
        period, times = 1, 1
        for candidate in range(1, min(MAX_PERIOD, (len(parts) - place) // 2) + 1):
            end = place
            while end + candidate < len(parts) and is_equal(end, end + candidate):
                end += 1
            found = (end - place) // candidate + 1
            if found >= (least if candidate < LONG_PERIOD else 2) and found * candidate > period * times:
                period, times = candidate, found
        run = parts[place : place + period * times]
        collapsed.append(NodeGroup(tuple(node for part in run for node in part.nodes), run[0].stage, times))
        place += period * times
    return collapsed


def _signature(part: NodeGroup, graph: Graph, specs: dict[str, TensorSpec]) -> object:
    """Equal for parts that look the same, whatever their names are."""
    nodes = []
    for node in part.nodes:
        state = tuple(specs[name] for name in (*node.parameters, *node.buffers))
        nodes.append((is_block(node), node.kind, state, tuple(value.spec for value in node.makes)))
    own = {value.name for node in part.nodes for value in node.makes}
    read = dict.fromkeys(value for node in part.nodes for value in node.reads if value not in own)
    # Inputs by name; values computed from inputs by type, as layers may use different masks of one shape.
    given = [value for value in read if value not in graph.makers]
    masks = [graph.spec(value) for value in read if value in graph.makers and graph.makers[value].from_inputs]
    return -1 if part.from_inputs else part.stage, tuple(nodes), tuple(given), tuple(dict.fromkeys(masks))


def _neighbours(
    parts: Sequence[NodeGroup], graph: Graph
) -> tuple[list[tuple[int, ...]], list[tuple[frozenset[int], ...]]]:
    """Per part the indices of the parts that it reads, and for each value that it makes those of its readers."""
    maker = {value.name: number for number, part in enumerate(parts) for node in part.nodes for value in node.makes}
    readers: dict[str, set[int]] = {value: set() for value in maker}
    sources: list[tuple[int, ...]] = []
    for number, part in enumerate(parts):
        read = [value for node in part.nodes for value in node.reads if maker.get(value, number) != number]
        sources.append(tuple(maker[value] for value in dict.fromkeys(read)))
        for value in read:
            readers[value].add(number)
    for value in set(graph.outputs) & set(maker):
        readers[value].add(OUTPUT)
    made = ([value.name for node in part.nodes for value in node.makes] for part in parts)
    return sources, [tuple(frozenset(readers[value]) for value in values) for values in made]
