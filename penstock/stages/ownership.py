"""Ownership: which stage owns each module, parameter and buffer, also those that the example did not use."""

from collections.abc import Iterable

from penstock.errors import PartitionError
from penstock.ir import Graph, Node, Partition


class Ownership:
    """Stages by name. What no node of the example uses goes with its nearest kin."""

    def __init__(self, graph: Graph, partition: Partition) -> None:
        self._partition = partition
        self._nodes = [(node.name, node.kind, node.reads) for node in graph.nodes]
        self._known: dict[str, int] = {}
        for node in graph.nodes:
            for name in (node.module, *node.parameters, *node.buffers):
                if not node.from_inputs or name not in self._known:
                    self._known[name] = partition.stage_of(node.name)
        used = {name for node in graph.nodes for name in (*node.parameters, *node.buffers)}
        used |= {name for group in graph.tied if used & set(group) for name in group}
        self.unused = [value.name for value in (*graph.parameters, *graph.buffers) if value.name not in used]

    def of(self, name: str) -> int:
        """The stage of a module, parameter or buffer: its own, or that of the name most like it."""
        return self._known[name] if name in self._known else self._known[max(self._known, key=_alike(name))]

    def unused_of(self, stage: int, names: Iterable[str]) -> list[str]:
        """Those among unused names that go to a stage."""
        return [name for name in names if self.of(name) == stage]

    def fit(self, graph: Graph) -> Partition:
        """The partition for another graph of the same model: new nodes go where their state or their values are."""
        owned = {name: stage for stage, names in enumerate(self._partition.stages) for name in names}
        if self._is_same(graph):
            return self._partition
        latest = self._latest(graph, owned)
        placed: dict[str, int] = {}
        for node in graph.nodes:
            earliest = max((placed[graph.makers[v].name] for v in node.reads if v in graph.makers), default=0)
            if node.is_leaf and node.name in owned:
                placed[node.name] = owned[node.name]
            elif node.parameters:
                placed[node.name] = self._place(node, earliest)
            else:
                # The number in the name of a function may be that of another call in this recording.
                placed[node.name] = min(max(owned.get(node.name, 0), earliest), max(latest[node.name], earliest))
        stages = range(self._partition.num_stages)
        return self._of(tuple(tuple(name for name, at in placed.items() if at == stage) for stage in stages))

    def _of(self, stages: tuple[tuple[str, ...], ...]) -> Partition:
        if () in stages:
            idle = stages.index(())
            raise PartitionError(
                "this batch leaves a stage nothing to do",
                stage=idle,
                planned=" ".join(self._partition.stages[idle]),
                hint="plan with a batch of this kind as the example, or with fewer stages",
            )
        return Partition(stages)

    def _is_same(self, graph: Graph) -> bool:
        """Whether the graph has the very nodes of the example, so that each goes where it was put."""
        return [(node.name, node.kind, node.reads) for node in graph.nodes] == self._nodes

    def _latest(self, graph: Graph, owned: dict[str, int]) -> dict[str, int]:
        """The last stage in which each node may be, so that those that read its values are not before it."""
        latest: dict[str, int] = {}
        bound = dict.fromkeys(
            (value.name for node in graph.nodes for value in node.makes), self._partition.num_stages - 1
        )
        for node in reversed(graph.nodes):
            stage = min((bound[value.name] for value in node.makes), default=self._partition.num_stages - 1)
            if node.is_leaf and node.name in owned:
                stage = owned[node.name]
            latest[node.name] = stage
            for value in node.reads:
                if value in bound:
                    bound[value] = min(bound[value], stage)
        return latest

    def _place(self, node: Node, earliest: int) -> int:
        homes = {self.of(name) for name in node.parameters}
        if not homes:
            return earliest
        if len(homes) > 1 or min(homes) < earliest:
            raise PartitionError(
                "this batch needs a part of the model in a stage that has already run",
                node=node.name,
                owned_by=sorted(homes),
                earliest=earliest,
                hint="split with a batch of this kind as the example",
            )
        return homes.pop()


def _alike(name: str):  # type: ignore[no-untyped-def]
    words = name.split(".")

    def common(other: str) -> int:
        others = other.split(".")
        same = next((n for n, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), None)
        return min(len(words), len(others)) if same is None else same

    return common
