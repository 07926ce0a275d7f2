"""The graph as arrays. An atom is a group of nodes that no cut may separate; most atoms are single nodes.

An array has an entry per atom, or per value, parameter or input-only node. Several atoms may use one of the latter: an
Incidence lists which.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.errors import PartitionError
from penstock.ir import Floats, Graph, Ints, Profile, TrainingState, did_you_mean

Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Incidence:
    """Which atoms use which items (values, tensors, nodes), as pairs sorted by item and then by atom, without repeats.

    A stage pays for an item once, however many of its atoms use it.
    """

    item: Ints
    atom: Ints

    @classmethod
    def of(cls, items: Sequence[int] | Ints, atoms: Sequence[int] | Ints) -> "Incidence":
        """Builds it from pairs in any order, repeated or not."""
        item, atom = np.asarray(items, dtype=np.int64), np.asarray(atoms, dtype=np.int64)
        width = int(atom.max()) + 1 if len(atom) else 1
        code = item * width + atom
        # np.unique sorts; most callers pass pairs that are sorted already.
        if len(code) and not (np.diff(code) > 0).all():
            code = np.unique(code)
        return cls(code // width, code % width)

    def by_stage(self, stage: Ints) -> "Incidence":
        """Replaces atoms by their stages; an item used twice in a stage counts once."""
        return Incidence.of(self.item, stage[self.atom])

    def sums(self, stage: Ints, num_stages: int, weights: Floats) -> Floats:
        """Returns per stage the total weight of the items that it uses."""
        pairs = self.by_stage(stage)
        return sums(pairs.atom, weights[pairs.item], num_stages)


def sums(group: Ints, weights: Floats, number: int) -> Floats:
    """Returns the sum of the weights of each of `number` groups."""
    return np.bincount(group, weights, minlength=number).astype(np.float64)


def grouped(key: Ints, value: Ints, number: int) -> tuple[Ints, ...]:
    """Returns the values of each key; keys must be sorted."""
    bounds = np.searchsorted(key, np.arange(number + 1))
    return tuple(value[low:high] for low, high in pairwise(bounds.tolist()))


@dataclass(frozen=True)
class Values:
    """Values that atoms pass to each other: maker, readers, bytes, and bytes of the gradient.

    The model's outputs have one reader more: an atom numbered `len(atoms)`, which belongs to the last stage.
    """

    maker: Ints
    forward: Floats
    backward: Floats
    uses: Incidence


@dataclass(frozen=True)
class Tensors:
    """Parameters and buffers, tied ones once."""

    state: Floats
    """bytes that a stage holds for each: the tensor and, if trained, its gradient and the optimizer's state"""
    parameters: Floats
    """bytes of the parameter alone; 0 for buffers"""
    uses: Incidence


@dataclass(frozen=True)
class InputOnly:
    """Nodes that depend on the model's inputs only: every stage that uses one runs it again."""

    nodes: tuple[int, ...]
    seconds: Floats
    kept: Floats
    uses: Incidence
    home: Ints
    """an atom that the node must stay with, or -1"""


@dataclass(frozen=True)
class SavedValues:
    """Memory of values that atoms save for their backward, each once per stage.

    Where that was not measured (`is_known` is False), a stage is assumed to hold all values that it receives.
    """

    sizes: Floats
    uses: Incidence
    is_known: bool


@dataclass(frozen=True)
class Atoms:
    """Groups of nodes, given by their positions in the graph, in an order in which they can run."""

    nodes: tuple[tuple[int, ...], ...]
    seconds: Floats
    """forward and backward of one microbatch"""
    kept: Floats
    """bytes held from forward to backward, beside `saved`"""
    values: Values
    tensors: Tensors
    input_only: InputOnly
    saved: SavedValues

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def edges(self) -> Incidence:
        """The edges between atoms: `item` is the atom that makes a value, `atom` one that reads it."""
        uses = self.values.uses
        maker = self.values.maker[uses.item]
        chosen = (maker != uses.atom) & (uses.atom < len(self))
        return Incidence.of(maker[chosen], uses.atom[chosen])

    @cached_property
    def edge_bytes(self) -> Floats:
        """Bytes that go along each edge, both ways."""
        values, edges = self.values, self.edges
        maker = values.maker[values.uses.item]
        chosen = (maker != values.uses.atom) & (values.uses.atom < len(self))
        code = maker[chosen] * len(self) + values.uses.atom[chosen]
        size = (values.forward + values.backward)[values.uses.item[chosen]]
        at = np.searchsorted(edges.item * len(self) + edges.atom, code)
        return sums(at, size, len(edges.item))

    @cached_property
    def successors(self) -> tuple[Ints, ...]:
        """Per atom the atoms that read its values."""
        return grouped(self.edges.item, self.edges.atom, len(self))

    @cached_property
    def predecessors(self) -> tuple[Ints, ...]:
        """Per atom the atoms whose values it reads."""
        by_reader = np.lexsort((self.edges.item, self.edges.atom))
        return grouped(self.edges.atom[by_reader], self.edges.item[by_reader], len(self))

    def merged(self, group: Ints) -> "Atoms":
        """Joins atoms of one group, or reorders them; groups must be numbered in an order in which they can run."""
        number = int(group.max()) + 1
        nodes: list[list[int]] = [[] for _ in range(number)]
        for place, target in zip(self.nodes, group.tolist(), strict=True):
            nodes[target] += place
        extended = np.append(group, number)  # the reader of the model's outputs
        inputs, tensors, values, saved = self.input_only, self.tensors, self.values, self.saved
        home = np.where(inputs.home >= 0, extended[inputs.home], -1)
        return Atoms(
            tuple(tuple(sorted(places)) for places in nodes),
            sums(group, self.seconds, number),
            sums(group, self.kept, number),
            Values(group[values.maker], values.forward, values.backward, values.uses.by_stage(extended)),
            Tensors(tensors.state, tensors.parameters, tensors.uses.by_stage(extended)),
            InputOnly(inputs.nodes, inputs.seconds, inputs.kept, inputs.uses.by_stage(extended), home),
            SavedValues(saved.sizes, saved.uses.by_stage(extended), saved.is_known),
        )


def build_atoms(graph: Graph, profile: Profile, groups: list[list[int]], training: TrainingState) -> Atoms:
    """Returns one atom per node, or per group of nodes that stay together; `groups` are positions of nodes."""
    atom, home = _number_nodes(graph, groups)
    costs = [profile[node.name] for node in graph.nodes]
    seconds = np.array([cost.seconds for cost in costs])
    kept = np.array([cost.saved.own if profile.held else cost.memory.kept for cost in costs], dtype=np.float64)
    real, input_only = np.flatnonzero(atom >= 0), np.flatnonzero(atom < 0)
    nodes: list[list[int]] = [[] for _ in range(int(atom.max()) + 1)]
    for place, owner in zip(real.tolist(), atom[real].tolist(), strict=True):
        nodes[owner].append(place)
    runs_input_only = _input_only_runs(graph, atom.tolist(), home.tolist())
    number = np.cumsum(atom < 0) - 1
    runs = [*zip(real.tolist(), atom[real].tolist(), strict=True), *runs_input_only]
    return Atoms(
        tuple(map(tuple, nodes)),
        sums(atom[real], seconds[real], len(nodes)),
        sums(atom[real], kept[real], len(nodes)),
        _values(graph, atom.tolist()),
        _tensors(graph, runs, training),
        InputOnly(
            tuple(input_only.tolist()),
            seconds[input_only],
            kept[input_only],
            Incidence.of([int(number[place]) for place, _ in runs_input_only], [user for _, user in runs_input_only]),
            home[input_only],
        ),
        _saved(graph, profile, runs),
    )


def _number_nodes(graph: Graph, groups: list[list[int]]) -> tuple[Ints, Ints]:
    """Returns the atom of every node, -1 for input-only nodes, and the atom that such a node must be with, or -1."""
    is_input_only = np.array([node.from_inputs for node in graph.nodes])
    if is_input_only.all():
        is_input_only[:] = False
    atom = np.where(is_input_only, -1, np.cumsum(~is_input_only) - 1)
    home = np.full(len(atom), -1, dtype=np.int64)
    if groups:
        atom = _contract(graph, atom, groups)
    for group in groups:
        real = [int(atom[place]) for place in group if atom[place] >= 0]
        for place in group:
            if atom[place] < 0:
                home[place] = real[0] if real else 0
    return atom, home


def _contract(graph: Graph, atom: Ints, groups: list[list[int]]) -> Ints:
    """Makes every group one atom, together with all nodes on a path from the group back to itself.

    Such nodes cannot be elsewhere: they would have to run both after and before the group.
    """
    import networkx as nx

    position = {node.name: place for place, node in enumerate(graph.nodes)}
    digraph = nx.DiGraph()
    digraph.add_nodes_from(range(int(atom.max()) + 1))
    edges = [(int(atom[position[e.producer]]), int(atom[position[e.consumer]])) for e in graph.edges]
    digraph.add_edges_from((source, target) for source, target in edges if min(source, target) >= 0)
    for group in groups:
        real = [int(atom[place]) for place in group if atom[place] >= 0]
        if len(real) > 1:
            nx.add_cycle(digraph, real)
    # With each group closed to a cycle, the strongly connected components are the atoms.
    components = nx.condensation(digraph)
    members: dict[int, Any] = dict(components.nodes(data="members"))
    renumbered = np.empty(len(digraph), dtype=np.int64)
    in_order = nx.lexicographical_topological_sort(components, key=lambda key: min(members[key]))
    for number, key in enumerate(in_order):
        renumbered[list(members[key])] = number
    return np.where(atom >= 0, renumbered[atom], -1)


def _input_only_runs(graph: Graph, atom: list[int], home: list[int]) -> Pairs:
    """Returns input-only nodes with the atoms that run them; the model's outputs count as one more atom."""
    made_by: dict[str, int] = {}
    closure: dict[int, set[int]] = {}
    runs: Pairs = []
    if min(atom) >= 0:
        return runs
    reads = [(place, node.reads) for place, node in enumerate(graph.nodes)]
    for place, values in [*reads, (len(atom), graph.outputs)]:
        needed = set[int]().union(*(closure[made_by[value]] for value in values if value in made_by))
        if place < len(atom) and atom[place] < 0:
            closure[place] = needed | {place}
            made_by.update((value.name, place) for value in graph.nodes[place].makes)
        else:
            user = atom[place] if place < len(atom) else max(atom) + 1
            runs += [(other, user) for other in sorted(needed)]
    # A node that nothing uses still runs once: where it has to be, else with the first atom.
    unused = set(closure) - {place for place, _ in runs}
    bound = [(place, max(home[place], 0)) for place in closure if place in unused or home[place] >= 0]
    return runs + [(other, user) for place, user in bound for other in sorted(closure[place])]


def _values(graph: Graph, atom: list[int]) -> Values:
    """The values that nodes of atoms make; those of input-only nodes are never sent."""
    number: dict[str, int] = {}
    maker: list[int] = []
    forward: list[int] = []
    backward: list[int] = []
    read: list[int] = []
    reader: list[int] = []
    for user, node in zip(atom, graph.nodes, strict=True):
        if user < 0:
            continue
        for value in node.reads:
            if value in number:
                read.append(number[value])
                reader.append(user)
        for made in node.makes:
            number[made.name] = len(maker)
            maker.append(user)
            forward.append(made.spec.bytes)
            backward.append(forward[-1] if made.spec.requires_grad else 0)
    returned = [number[value] for value in graph.outputs if value in number]
    uses = Incidence.of(read + returned, reader + [max(atom) + 1] * len(returned))
    sizes, gradients = (np.array(column, dtype=np.float64) for column in (forward, backward))
    return Values(np.array(maker, dtype=np.int64), sizes, gradients, uses)


def _tensors(graph: Graph, runs: Pairs, training: TrainingState) -> Tensors:
    """Parameters and buffers with the atoms that use them; `runs` are the nodes that each atom runs."""
    state = [*((value, True) for value in graph.parameters), *((value, False) for value in graph.buffers)]
    number = {value.name: index for index, (value, _) in enumerate(state)}
    held = np.array([training.state_bytes([value.spec]).total for value, _ in state], dtype=np.float64)
    parameters = [value.spec.bytes if is_parameter else 0 for value, is_parameter in state]
    uses = [
        (number[graph.tensor_of(name)], user)
        for place, user in runs
        for name in graph.nodes[place].parameters + graph.nodes[place].buffers
    ]
    pairs = np.array(uses, dtype=np.int64).reshape(-1, 2)
    return Tensors(held, np.array(parameters, dtype=np.float64), Incidence.of(pairs[:, 0], pairs[:, 1]))


def _saved(graph: Graph, profile: Profile, runs: Pairs) -> SavedValues:
    """The values that are held for the backward with the atoms that save them, if the profile has measured them."""
    if not profile.held:
        return SavedValues(np.zeros(0), Incidence.of([], []), False)
    number = {name: index for index, (name, _) in enumerate(profile.held)}
    uses = [
        (number[name], user)
        for place, user in runs
        for value in profile[graph.nodes[place].name].saved.values
        if (name := graph.storage_of(value)) in number
    ]
    pairs = np.array(uses, dtype=np.int64).reshape(-1, 2)
    sizes = np.array([size for _, size in profile.held], dtype=np.float64)
    return SavedValues(sizes, Incidence.of(pairs[:, 0], pairs[:, 1]), True)


def inseparable_nodes(graph: Graph) -> list[list[int]]:
    """Returns groups of positions of nodes that no cut may separate: those that share written memory or written state.

    Besides makers and writers of such memory these are the nodes that read it before it is last written.
    """
    if not graph.updates and not any(group.writers for group in graph.storage):
        return []
    position = {node.name: place for place, node in enumerate(graph.nodes)}
    written = [group for group in graph.storage if group.writers]
    readers: dict[str, list[int]] = {value: [] for group in written for value in group.values}
    if readers:
        for place, node in enumerate(graph.nodes):
            for value in node.reads:
                if value in readers:
                    readers[value].append(place)
    groups = []
    for group in written:
        makers = [position[graph.makers[value].name] for value in group.values if value in graph.makers]
        writers = [position[writer] for writer in group.writers]
        read = [place for value in group.values for place in readers[value] if place <= max(writers)]
        groups.append([*makers, *writers, *read])
    groups += [[position[node.name] for node in nodes] for nodes in graph.updated.values()]
    return [sorted(set(places)) for places in groups if len(set(places)) > 1]


def named_groups(graph: Graph, groups: Sequence[Sequence[str]]) -> list[list[int]]:
    """Returns the positions of the nodes of each group; a module name selects all nodes of the module."""
    position = {node.name: place for place, node in enumerate(graph.nodes)}
    problem = "no such node or module to keep together"
    found = [
        [[position[name]] if name in position else places_of_module(graph, name, problem, position) for name in group]
        for group in groups
    ]
    return [sorted({place for places in group for place in places}) for group in found]


def places_of_module(
    graph: Graph, module: str, problem: str = "no such module", names: Iterable[str] = ()
) -> list[int]:
    """Returns the positions of the nodes of a module; `names` are further names to suggest in the error."""
    found = [n for n, node in enumerate(graph.nodes) if node.module == module or node.module.startswith(f"{module}.")]
    if not found:
        known = sorted({*names, *(node.module for node in graph.nodes)} - {""})
        raise PartitionError(problem, name=repr(module), hint=did_you_mean(str(module), known))
    return found
