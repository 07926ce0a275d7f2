"""The nodes of every stage, and the values that cross each cut."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from penstock.errors import PartitionError
from penstock.ir.arguments import did_you_mean
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.placement import Cuts


@dataclass(frozen=True)
class Crossing:
    """The values that one stage sends to another for one microbatch, as one message."""

    producer: int
    consumer: int
    values: tuple[Value, ...]
    optional_gradients: tuple[str, ...] = ()
    """names of values for which the loss may leave no gradient, not even zeros"""

    @property
    def forward_bytes(self) -> int:
        """Bytes of the values."""
        return sum(value.spec.bytes for value in self.values)

    @property
    def backward_bytes(self) -> int:
        """Bytes of the gradients that are sent back."""
        return sum(value.spec.bytes for value in self.gradients)

    @cached_property
    def gradients(self) -> tuple[Value, ...]:
        """The values whose gradients are sent back."""
        return tuple(value for value in self.values if value.spec.requires_grad)


@dataclass(frozen=True)
class Partition:
    """The names of the nodes of every stage, each node in exactly one.

    The inputs of the model are on every stage, so they are never sent. A node that depends on inputs only is recomputed
    by every stage that reads it, so its values are never sent either. The last stage returns the outputs of the model:
    an output that an earlier stage makes is sent to it.
    """

    stages: tuple[tuple[str, ...], ...]
    """per stage the names of its nodes"""

    def __post_init__(self) -> None:
        if not self.stages:
            raise PartitionError("a partition must have stages")
        for stage, nodes in enumerate(self.stages):
            if not nodes:
                raise PartitionError("every stage must have a node", stage=stage, stages=self.num_stages)
        for node, times in Counter(chain.from_iterable(self.stages)).items():
            if times > 1:
                raise PartitionError("a node must be in one stage only", node=repr(node), times=times)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    def stage_of(self, node: str) -> int:
        """The stage that owns the node."""
        if node not in self._stage_of:
            raise PartitionError("no stage owns this node", node=repr(node), hint=did_you_mean(node, self._stage_of))
        return self._stage_of[node]

    def check(self, graph: Graph) -> None:
        """Raise if the graph cannot be cut like this; the error names the nodes and values."""
        names = {node.name for node in graph.nodes}
        for node, stage in self._stage_of.items():
            if node not in names:
                raise PartitionError("no such node", node=repr(node), stage=stage, hint=did_you_mean(node, names))
        if missing := [node.name for node in graph.nodes if node.name not in self._stage_of]:
            raise PartitionError("every node must be in a stage", nodes=len(missing), first=repr(missing[0]))
        for producer, consumer, value in _sent_edges(graph):
            if self._stage_of[producer] > self._stage_of[consumer]:
                raise PartitionError(
                    "a stage reads a value of a later stage",
                    value=repr(value),
                    made_by=f"{producer!r} in stage {self._stage_of[producer]}",
                    read_by=f"{consumer!r} in stage {self._stage_of[consumer]}",
                )
        # Storage that is written in place must stay within one stage and may leave it only after the last write.
        position = {node.name: place for place, node in enumerate(graph.nodes)}
        overwritten: dict[str, str] = {}
        for group in graph.storage:
            if group.writers:
                makers = {value: graph.makers[value] for value in group.values if value in graph.makers}
                nodes = (*makers.values(), *(graph[name] for name in group.writers))
                stages = {node.name: self._stage_of[node.name] for node in nodes if not node.from_inputs}
                if len(set(stages.values())) > 1:
                    problem = "nodes that share memory must be in one stage"
                    raise PartitionError(problem, stages=stages, values=group.values)
                last = max(group.writers, key=lambda name: position[name])
                early = [value for value, maker in makers.items() if position[maker.name] < position[last]]
                overwritten |= dict.fromkeys(early, last)
        for value, reader in self._read_values(graph):
            owner = self._stage_of[graph.makers[value].name]
            if value in overwritten and owner != reader:
                raise PartitionError(
                    "a value that is later overwritten in place crosses a cut",
                    value=repr(value),
                    overwritten_by=repr(overwritten[value]),
                    made_in_stage=owner,
                    read_in_stage=reader,
                )
        # State that the forward writes must be used by one stage only: other stages would not see the write.
        for name, users in graph.updated.items():
            if len({self._stage_of[node.name] for node in users}) > 1:
                writers = [update.node for update in graph.updates if name in map(graph.tensor_of, update.names)]
                raise PartitionError(
                    "a parameter or buffer that the forward writes is used in several stages",
                    name=repr(name),
                    written_by=", ".join(f"{writer!r} in stage {self._stage_of[writer]}" for writer in writers[:4]),
                    used_by=", ".join(f"{node.name!r} in stage {self._stage_of[node.name]}" for node in users[:4]),
                    hint=f"keep the nodes from {users[0].name!r} to {users[-1].name!r} in one stage",
                )

    def crossings(self, graph: Graph) -> tuple[Crossing, ...]:
        """The values sent between every two stages, by producer and consumer; a skip is sent directly to its reader."""
        self.check(graph)
        values: dict[tuple[int, int], dict[str, Value]] = {}
        for value, reader in self._read_values(graph):
            owner = self._stage_of[graph.makers[value].name]
            if owner != reader:
                values.setdefault((owner, reader), {})[value] = Value(value, graph.spec(value))
        return tuple(Crossing(*edge, tuple(found.values())) for edge, found in sorted(values.items()))

    def cuts(self, graph: Graph) -> Cuts:
        """The edges between stages; an edge of which no value needs a gradient is one without gradient."""
        crossings = self.crossings(graph)
        silent = [crossing for crossing in crossings if not crossing.gradients]
        return Cuts.of(self.num_stages, _edges(crossings), _edges(silent))

    def _read_values(self, graph: Graph) -> Iterator[tuple[str, int]]:
        """Every value with each stage that reads it; the last stage reads the outputs."""
        for _, consumer, value in _sent_edges(graph):
            yield value, self._stage_of[consumer]
        for value in graph.outputs:
            if value in graph.makers and not graph.makers[value].from_inputs:
                yield value, self.num_stages - 1

    def runs(self, graph: Graph) -> tuple[tuple[Node, ...], ...]:
        """The nodes that every stage runs, in the graph's order: its own, and those from inputs that it needs."""
        # By node, the stages that run it.
        users = {node: {stage} for node, stage in self._stage_of.items()}
        for name in _from_inputs(graph, graph.outputs):
            users.setdefault(name, set()).add(self.num_stages - 1)
        for node in reversed(graph.nodes):
            for name in _from_inputs(graph, node.reads):
                users.setdefault(name, set()).update(users.get(node.name, ()))
        runs: list[list[Node]] = [[] for _ in self.stages]
        for node in graph.nodes:
            for stage in users.get(node.name, ()):
                runs[stage].append(node)
        return tuple(map(tuple, runs))

    @cached_property
    def _stage_of(self) -> dict[str, int]:
        return {node: stage for stage, nodes in enumerate(self.stages) for node in nodes}


def _sent_edges(graph: Graph) -> Iterator[tuple[str, str, str]]:
    return (edge for edge in graph.edges if not graph[edge.producer].from_inputs)


def _from_inputs(graph: Graph, values: Iterable[str]) -> set[str]:
    """The nodes that make the values and depend on inputs only."""
    makers = (graph.makers[value] for value in values if value in graph.makers)
    return {node.name for node in makers if node.from_inputs}


def _edges(crossings: Iterable[Crossing]) -> list[tuple[int, int]]:
    return [(crossing.producer, crossing.consumer) for crossing in crossings]
