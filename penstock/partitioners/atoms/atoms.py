"""Atoms: the graph in figures: pieces that are never cut, what each of them costs, and what they share."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.partitioners.atoms.uses import Floats, Ints, Uses, sums


@dataclass(frozen=True)
class Values:
    """What atoms hand to each other: who makes each value, who reads it, its bytes and those of its gradient.

    What the model returns is read by one more than there are atoms, who belongs to the last stage.
    """

    maker: Ints
    forward: Floats
    backward: Floats
    uses: Uses


@dataclass(frozen=True)
class Tensors:
    """Parameters and buffers, tied ones once: what a stage holds for each, and how much of that is the parameter."""

    state: Floats
    parameters: Floats
    uses: Uses


@dataclass(frozen=True)
class Free:
    """Nodes that depend on inputs only: every stage that uses one runs it; `home` is an atom it stays with, or -1."""

    nodes: tuple[int, ...]
    seconds: Floats
    kept: Floats
    uses: Uses
    home: Ints


@dataclass(frozen=True)
class Held:
    """Memory of values that atoms hold for their backward, each once per stage.

    Where that is not known, a stage is taken to hold everything that it receives.
    """

    sizes: Floats
    uses: Uses
    is_known: bool


@dataclass(frozen=True)
class Atoms:
    """Groups of nodes, by their positions in the graph, in an order in which they can run."""

    nodes: tuple[tuple[int, ...], ...]
    seconds: Floats
    """forward and backward of one microbatch"""
    kept: Floats
    """bytes held from forward to backward, beside values that are held"""
    values: Values
    tensors: Tensors
    free: Free
    held: Held

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def arrows(self) -> Uses:
        """The atoms (as things) whose values each atom reads."""
        uses = self.values.uses
        maker = self.values.maker[uses.thing]
        chosen = (maker != uses.atom) & (uses.atom < len(self))
        return Uses.of(maker[chosen], uses.atom[chosen])

    @cached_property
    def successors(self) -> tuple[Ints, ...]:
        """Per atom the atoms that read its values."""
        return grouped(self.arrows.thing, self.arrows.atom, len(self))

    @cached_property
    def predecessors(self) -> tuple[Ints, ...]:
        """Per atom the atoms whose values it reads."""
        by_reader = np.lexsort((self.arrows.thing, self.arrows.atom))
        return grouped(self.arrows.atom[by_reader], self.arrows.thing[by_reader], len(self))

    def merged(self, group: Ints) -> "Atoms":
        """Fewer and larger atoms, numbered by `group`, or the same in another order; an order in which they can run."""
        number = int(group.max()) + 1
        nodes: list[list[int]] = [[] for _ in range(number)]
        for place, target in zip(self.nodes, group.tolist(), strict=True):
            nodes[target] += place
        extended = np.append(group, number)
        free, tensors, values, held = self.free, self.tensors, self.values, self.held
        home = np.where(free.home >= 0, extended[free.home], -1)
        return Atoms(
            tuple(tuple(sorted(places)) for places in nodes),
            sums(group, self.seconds, number),
            sums(group, self.kept, number),
            Values(group[values.maker], values.forward, values.backward, values.uses.by_stage(extended)),
            Tensors(tensors.state, tensors.parameters, tensors.uses.by_stage(extended)),
            Free(free.nodes, free.seconds, free.kept, free.uses.by_stage(extended), home),
            Held(held.sizes, held.uses.by_stage(extended), held.is_known),
        )


def grouped(key: Ints, value: Ints, number: int) -> tuple[Ints, ...]:
    """The values of each key, keys being sorted."""
    bounds = np.searchsorted(key, np.arange(number + 1))
    return tuple(value[low:high] for low, high in pairwise(bounds.tolist()))
