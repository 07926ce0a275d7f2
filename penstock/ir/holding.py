"""Holding: the bytes that every stage holds for its backward, from what its nodes hold."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.ir.graph import Graph, Node
from penstock.ir.partition import Crossing
from penstock.ir.placement import Placement
from penstock.ir.profile import Profile, SavedTensors


class StageBytes(NamedTuple):
    """Held by one stage for one microbatch: until the backward, and between input and weight gradient."""

    kept: int
    late: int


def stage_bytes(
    graph: Graph,
    profile: Profile,
    runs: Sequence[Sequence[Node]],
    crossings: Sequence[Crossing],
    placement: Placement | None = None,
    recomputed: Collection[int] = (),
) -> list[StageBytes]:
    """What stages hold; `runs` are the nodes of each.

    A block of a stage that is recomputed holds nothing but what it reads, and copies of the buffers that it writes,
    until it runs again in the backward. Stages on one rank share the memory of what one hands the other, which is known
    with a placement only. Where the profile does not say who holds what, everything that a stage receives is taken to
    be held, and nothing else if it is recomputed.
    """
    if not profile.held:
        return [_summed(profile, () if s in recomputed else runs[s], s, crossings) for s in range(len(runs))]
    holds = [[profile[node.name].saved for node in nodes] for nodes in runs]
    again = _holds_of_blocks(graph) if recomputed else {}
    for stage in recomputed:
        pairs = zip(runs[stage], holds[stage], strict=True)
        holds[stage] = [_recomputed(each, again[node.name]) if node.name in again else each for node, each in pairs]
    memory = _Memory(graph, dict(profile.held), holds, crossings, placement)
    return [memory.of(stage) for stage in range(len(runs))]


def blocks(graph: Graph) -> frozenset[str]:
    """The nodes that a stage that recomputes runs again: blocks that write nothing but buffers."""
    buffers = {value.name for value in graph.buffers}
    writers = {writer for group in graph.storage for writer in group.writers}
    writers |= {update.node for update in graph.updates if not buffers.issuperset(update.names)}
    return frozenset(node.name for node in graph.nodes if node.is_leaf and node.name not in writers)


def _holds_of_blocks(graph: Graph) -> dict[str, SavedTensors]:
    """What blocks hold until they run again."""
    sizes = {value.name: value.spec.bytes for value in graph.buffers}
    copies = Counter[str]()
    for update in graph.updates:
        copies[update.node] += sum(sizes.get(name, 0) for name in update.names)
    return {name: SavedTensors(own=copies[name], values=graph[name].reads) for name in blocks(graph)}


def _recomputed(holds: SavedTensors, again: SavedTensors) -> SavedTensors:
    """Until the backward what is needed to run again; after it the same as without."""
    return replace(holds, own=again.own, values=again.values)


def _summed(profile: Profile, nodes: Sequence[Node], stage: int, crossings: Iterable[Crossing]) -> StageBytes:
    received = sum(crossing.forward_bytes for crossing in crossings if crossing.consumer == stage)
    figures = [profile[node.name].memory for node in nodes]
    return StageBytes(
        sum(each.kept for each in figures) + received, sum(each.kept_for_weight_grad for each in figures) + received
    )


class _Memory:
    """Values by the first name of their memory, and which stage holds or receives which."""

    def __init__(
        self,
        graph: Graph,
        sizes: dict[str, int],
        holds: Sequence[Sequence[SavedTensors]],
        crossings: Sequence[Crossing],
        placement: Placement | None,
    ) -> None:
        self._graph, self._sizes, self._holds = graph, sizes, holds
        self._first = {name: group.values[0] for group in graph.storage for name in group.values}
        self._kept = [self._names(name for each in stage for name in each.values) for stage in holds]
        self._late = [self._names(name for each in stage for name in each.late_values) for stage in holds]
        self._received: list[Counter[str]] = [Counter() for _ in holds]
        self._handed: list[dict[str, int]] = [{} for _ in holds]
        for crossing in crossings:
            self._receive(crossing, placement)

    def _receive(self, crossing: Crossing, placement: Placement | None) -> None:
        for value in crossing.values:
            name = self._first.get(value.name, value.name)
            if placement is not None and placement[crossing.producer] == placement[crossing.consumer]:
                self._handed[crossing.consumer][name] = crossing.producer
            else:
                self._received[crossing.consumer][name] += value.spec.bytes

    def of(self, stage: int) -> StageBytes:
        """The bytes of a stage."""
        holds = self._holds[stage]
        gradients = {name for each in holds for name in each.late_gradients}
        kept = sum(each.own for each in holds) + self._shared(stage, self._kept)
        late = sum(each.late_own for each in holds) + self._shared(stage, self._late)
        return StageBytes(kept, late + sum(self._graph.spec(name).bytes for name in gradients))

    def _shared(self, stage: int, held: Sequence[set[str]]) -> int:
        """What was handed over on the same rank and is held by its maker, too, is the maker's."""
        handed, received = self._handed[stage], self._received[stage]
        own = (name for name in held[stage] if name not in handed or name not in held[handed[name]])
        return sum(received[name] if name in received else self._sizes.get(name, 0) for name in own)

    def _names(self, values: Iterable[str]) -> set[str]:
        return {self._first.get(value, value) for value in values}
