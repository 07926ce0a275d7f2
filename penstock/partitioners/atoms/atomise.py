"""atomise: a Graph with its Profile as Atoms."""

import numpy as np

from penstock.ir import Graph, Profile
from penstock.partitioners.atoms.atoms import Atoms, Free, Held, Tensors, Values
from penstock.partitioners.atoms.uses import Ints, Uses, sums

Pairs = list[tuple[int, int]]


def atomise(graph: Graph, profile: Profile, groups: list[list[int]], optimizer_copies: int = 0) -> Atoms:
    """One atom per node, or per group of nodes that stay together, with what lies between them."""
    atom, home = number_nodes(graph, groups)
    costs = [profile[node.name] for node in graph.nodes]
    seconds = np.array([cost.forward + cost.backward for cost in costs])
    kept = np.array([cost.saved.own if profile.held else cost.memory.kept for cost in costs], dtype=np.float64)
    real, free = np.flatnonzero(atom >= 0), np.flatnonzero(atom < 0)
    nodes: list[list[int]] = [[] for _ in range(int(atom.max()) + 1)]
    for place, owner in zip(real.tolist(), atom[real].tolist(), strict=True):
        nodes[owner].append(place)
    needs = _needs(graph, atom.tolist(), home.tolist())
    number = np.cumsum(atom < 0) - 1
    run_by = [*zip(real.tolist(), atom[real].tolist(), strict=True), *needs]
    return Atoms(
        tuple(map(tuple, nodes)),
        sums(atom[real], seconds[real], len(nodes)),
        sums(atom[real], kept[real], len(nodes)),
        _values(graph, atom.tolist()),
        _tensors(graph, run_by, optimizer_copies),
        Free(
            tuple(free.tolist()),
            seconds[free],
            kept[free],
            Uses.of([int(number[place]) for place, _ in needs], [user for _, user in needs]),
            home[free],
        ),
        _held(graph, profile, run_by),
    )


def number_nodes(graph: Graph, groups: list[list[int]]) -> tuple[Ints, Ints]:
    """The atom of every node, -1 for those from inputs only; and the atom that such a node has to be with, or -1."""
    is_free = np.array([node.from_inputs for node in graph.nodes])
    if is_free.all():
        is_free[:] = False
    atom = np.where(is_free, -1, np.cumsum(~is_free) - 1)
    home = np.full(len(atom), -1, dtype=np.int64)
    if groups:
        atom = _contracted(graph, atom, groups)
    for group in groups:
        real = [int(atom[place]) for place in group if atom[place] >= 0]
        for place in group:
            if atom[place] < 0:
                home[place] = real[0] if real else 0
    return atom, home


def _contracted(graph: Graph, atom: Ints, groups: list[list[int]]) -> Ints:
    """Groups become one atom each, together with whatever is on a way from a group back to itself."""
    import networkx as nx

    position = {node.name: place for place, node in enumerate(graph.nodes)}
    web = nx.DiGraph()
    web.add_nodes_from(range(int(atom.max()) + 1))
    edges = [(int(atom[position[e.producer]]), int(atom[position[e.consumer]])) for e in graph.edges]
    web.add_edges_from((source, target) for source, target in edges if min(source, target) >= 0)
    for group in groups:
        real = [int(atom[place]) for place in group if atom[place] >= 0]
        if len(real) > 1:
            nx.add_cycle(web, real)
    whole = nx.condensation(web)
    members = dict(whole.nodes(data="members"))
    renumbered = np.empty(len(web), dtype=np.int64)
    in_order = nx.lexicographical_topological_sort(whole, key=lambda key: min(members[key]))
    for number, key in enumerate(in_order):
        renumbered[list(members[key])] = number
    return np.where(atom >= 0, renumbered[atom], -1)


def _needs(graph: Graph, atom: list[int], home: list[int]) -> Pairs:
    """Nodes from inputs with the atoms that run them; the model's outputs count as one atom more."""
    made_by: dict[str, int] = {}
    closure: dict[int, set[int]] = {}
    needs: Pairs = []
    if min(atom) >= 0:
        return needs
    reads = [(place, node.reads) for place, node in enumerate(graph.nodes)]
    for place, values in [*reads, (len(atom), graph.outputs)]:
        needed = set[int]().union(*(closure[made_by[value]] for value in values if value in made_by))
        if place < len(atom) and atom[place] < 0:
            closure[place] = needed | {place}
            made_by.update((value.name, place) for value in graph.nodes[place].makes)
        else:
            user = atom[place] if place < len(atom) else max(atom) + 1
            needs += [(other, user) for other in sorted(needed)]
    lone = set(closure) - {place for place, _ in needs}
    bound = [(place, max(home[place], 0)) for place in closure if place in lone or home[place] >= 0]
    return needs + [(other, user) for place, user in bound for other in sorted(closure[place])]


def _values(graph: Graph, atom: list[int]) -> Values:
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
    uses = Uses.of(read + returned, reader + [max(atom) + 1] * len(returned))
    sizes, gradients = (np.array(figures, dtype=np.float64) for figures in (forward, backward))
    return Values(np.array(maker, dtype=np.int64), sizes, gradients, uses)


def _tensors(graph: Graph, runs: Pairs, optimizer_copies: int) -> Tensors:
    """Parameters and buffers; what is trained has a gradient and the optimizer's copies too."""
    state = [*((value, True) for value in graph.parameters), *((value, False) for value in graph.buffers)]
    number = {value.name: index for index, (value, _) in enumerate(state)}
    size = np.array([value.spec.bytes for value, _ in state], dtype=np.float64)
    trained = np.array([value.spec.requires_grad for value, _ in state], dtype=np.float64)
    is_parameter = np.array([found for _, found in state], dtype=np.float64)
    uses = [
        (number[graph.tensor_of(name)], user)
        for place, user in runs
        for name in graph.nodes[place].parameters + graph.nodes[place].buffers
    ]
    pairs = np.array(uses, dtype=np.int64).reshape(-1, 2)
    held = size * (1 + trained * (1 + optimizer_copies))
    return Tensors(held, size * is_parameter, Uses.of(pairs[:, 0], pairs[:, 1]))


def _held(graph: Graph, profile: Profile, runs: Pairs) -> Held:
    """Values by the first name of their memory."""
    if not profile.held:
        return Held(np.zeros(0), Uses.of([], []), False)
    first = {name: group.values[0] for group in graph.storage for name in group.values}
    number = {name: index for index, (name, _) in enumerate(profile.held)}
    uses = [
        (number[name], user)
        for place, user in runs
        for value in profile[graph.nodes[place].name].saved.values
        if (name := first.get(value, value)) in number
    ]
    pairs = np.array(uses, dtype=np.int64).reshape(-1, 2)
    return Held(np.array([size for _, size in profile.held], dtype=np.float64), Uses.of(pairs[:, 0], pairs[:, 1]), True)
