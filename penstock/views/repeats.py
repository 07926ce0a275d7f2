"""Repeats: runs of like parts found and made one, so that a model of many layers is seen at a glance.

Parts are alike when their nodes have the same kinds, parameters and results, and when they read from and are read by
the same parts, or by parts that stand equally far from each. So no connection is lost: one that leaves a run in the
middle, as the skips of a U-Net do, keeps the run apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.ir import Graph, Node, TensorSpec
from penstock.views.parts import Part, is_block

MAX_PERIOD, LONG = 64, 12
"""most parts of a repetition; a repetition of so many parts need not be repeated more than once"""
OUTSIDE = -1
"""stands for the reader of the graph's outputs"""


@dataclass(frozen=True)
class Likeness:
    """What parts are compared by: their looks, and the places of the parts that they read and are read by."""

    looks: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[frozenset[int], ...], ...]

    def holds(self, one: int, other: int) -> bool:
        """Whether two parts are alike."""
        if self.looks[one] != self.looks[other] or len(self.sources[one]) != len(self.sources[other]):
            return False
        pairs = zip(self.sources[one], self.sources[other], strict=True)
        if not all(a == b or one - a == other - b for a, b in pairs):
            return False
        readers = zip(self.targets[one], self.targets[other], strict=True)
        return all({a - one for a in old - new} == {b - other for b in new - old} for old, new in readers)


def collapsed(graph: Graph, free: Sequence[Part], others: Sequence[Part], least: int) -> tuple[list[Part], list[Part]]:
    """Both lists of parts, with at least so many repetitions made one, or two that are long."""
    look_of = _Looks(graph)
    free_looks = [look_of(part) for part in free]
    nothing: tuple[tuple[int, ...], ...] = ((),) * len(free)
    unread: tuple[tuple[frozenset[int], ...], ...] = ((),) * len(free)
    alike = Likeness(tuple(look_of(part) for part in others), *_neighbours(graph, others))
    return (
        list(_merged(free, Likeness(tuple(free_looks), nothing, unread), least)),
        list(_merged(others, alike, least)),
    )


def _merged(parts: Sequence[Part], alike: Likeness, least: int) -> Iterator[Part]:
    place = 0
    while place < len(parts):
        period, times = _repeats(alike, place, least)
        found = parts[place : place + period * times]
        yield Part(tuple(node for part in found for node in part.nodes), found[0].stage, times)
        place += period * times


def _repeats(alike: Likeness, start: int, least: int) -> tuple[int, int]:
    """How many parts from here on make a repetition, and how often it is repeated: what covers most."""
    best, total = (1, 1), len(alike.looks)
    for period in range(1, min(MAX_PERIOD, (total - start) // 2) + 1):
        place = start
        while place + period < total and alike.holds(place, place + period):
            place += 1
        times = (place - start) // period + 1
        if times >= (least if period < LONG else 2) and times * period > best[0] * best[1]:
            best = (period, times)
    return best


def _neighbours(
    graph: Graph, parts: Sequence[Part]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[frozenset[int], ...], ...]]:
    """Per part the places of the parts that it reads, and for each value that it makes those that read it."""
    place = {node.name: number for number, part in enumerate(parts) for node in part.nodes}
    made = {value.name: place[name] for name in place for value in graph[name].makes}
    readers: dict[str, set[int]] = {value: set() for value in made}
    sources: list[tuple[int, ...]] = []
    for number, part in enumerate(parts):
        read = [value for node in part.nodes for value in node.reads if made.get(value, number) != number]
        sources.append(tuple(made[value] for value in dict.fromkeys(read)))
        for value in read:
            readers[value].add(number)
    for value in set(graph.outputs) & set(made):
        readers[value].add(OUTSIDE)
    makes = ([value.name for node in part.nodes for value in node.makes] for part in parts)
    return tuple(sources), tuple(tuple(frozenset(readers[value]) for value in values) for values in makes)


class _Looks:
    """Numbers that are equal for parts that look alike, whatever they are called."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._specs = {value.name: value.spec for value in (*graph.parameters, *graph.buffers)}
        self._numbers: dict[object, int] = {}
        self._look_of: dict[str, int] = {}

    def __call__(self, part: Part) -> int:
        own = {value.name for node in part.nodes for value in node.makes}
        read = [value for node in part.nodes for value in node.reads if value not in own]
        look = (
            -1 if part.is_free else part.stage,
            tuple(map(self._node, part.nodes)),
            # What is read of glue from inputs need not be the same (a mask of two forms), but from glue that looks it.
            tuple(dict.fromkeys(self._look_of.get(value, value) for value in read if self._is_from_inputs(value))),
        )
        number = self._numbers.setdefault(look, len(self._numbers))
        if part.is_free:
            self._look_of |= dict.fromkeys(own, number)
        return number

    def _is_from_inputs(self, value: str) -> bool:
        return value not in self._graph.makers or self._graph.makers[value].from_inputs

    def _node(self, node: Node) -> tuple[bool, str, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        state = tuple(self._specs[name] for name in (*node.parameters, *node.buffers))
        return is_block(node), node.kind, state, tuple(value.spec for value in node.makes)
