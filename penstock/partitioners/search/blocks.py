"""blocks: atoms joined to the blocks of the model, as its names tell them, and those to a wished number of pieces."""

import numpy as np

from penstock.ir import Graph
from penstock.partitioners.atoms.atoms import Atoms
from penstock.partitioners.atoms.uses import Floats
from penstock.partitioners.atoms.windows import Box
from penstock.partitioners.search.runs import Runs


def block_of(module: str) -> str:
    """The name of the block that a module is part of: up to the first number in it, else its first word."""
    words = module.split(".")
    for length, word in enumerate(words, 1):
        if word.isdigit():
            return ".".join(words[:length])
    return words[0]


def pieces(graph: Graph, atoms: Atoms, number: int) -> list[int]:
    """Boundaries of consecutive atoms, first and last included: blocks, joined until there are at most `number`.

    The two neighbours that are lightest together are joined; of equally light ones those between which most bytes go.
    """
    names = [block_of(graph.nodes[nodes[0]].module) for nodes in atoms.nodes]
    places = [0, *(at for at in range(1, len(atoms)) if names[at] != names[at - 1]), len(atoms)]
    if len(places) - 1 < number:
        places = list(range(len(atoms) + 1))
    added = Runs(atoms).weighing.added
    crossing = Runs(atoms).bytes(Box(0, len(atoms), len(atoms), len(atoms)))[:, 0]
    while len(places) - 1 > number:
        weights = added[places[2:]] - added[places[:-2]]
        del places[1 + int(np.lexsort((-crossing[places[1:-1]], weights))[0])]
    return places


def dealt(weights: Floats, num_ranks: int) -> list[int]:
    """A rank per piece: the heaviest piece first, to the rank that has least; of several, to that of a neighbour."""
    loads, rank = np.zeros(num_ranks), np.full(len(weights) + 2, -1)
    for piece in np.argsort(-weights, kind="stable").tolist():
        least = np.flatnonzero(loads <= loads.min() * (1 + 1e-9))
        beside = [other for other in (rank[piece], rank[piece + 2]) if other in least]
        rank[piece + 1] = beside[0] if beside else least[0]
        loads[rank[piece + 1]] += weights[piece]
    return [int(each) for each in rank[1:-1]]
