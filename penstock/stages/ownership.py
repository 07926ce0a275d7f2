"""Which stage owns each module, parameter and buffer, and which ranks use it; where nodes of other recordings go."""

from collections.abc import Iterable
from itertools import takewhile

from penstock.errors import PartitionError
from penstock.ir import Graph, Node, Partition, Plan


class FittedPartition(Partition):
    """The partition of a batch for which a stage may have nothing to run, as when layer drop leaves out its blocks."""

    def __post_init__(self) -> None:
        """Unlike in the partition of a plan, stages may be empty."""


class Ownership:
    """The stage of every module, parameter and buffer, by name.

    A name that no node of the example uses belongs to the stage of the most similar name, which shares the most leading
    words with it. Among equally similar names the next one in the order of the model is taken, or the last one if none
    follows: a block that layer drop left out of the example is then in the stage of the next block, or of the last. A
    name that shares no word with another belongs to the first stage.
    """

    def __init__(self, graph: Graph, partition: Partition) -> None:
        self._partition = partition
        self._nodes = _node_keys(graph)
        self._positions = {value.name: at for at, value in enumerate((*graph.parameters, *graph.buffers))}
        self._stages: dict[str, int] = {}
        # All stages that use a parameter or buffer: a module may be called in several.
        self._holders: dict[str, set[int]] = {}
        for node in graph.nodes:
            for name in (node.module, *node.parameters, *node.buffers):
                # Nodes that depend on the inputs alone run on several stages; another user takes precedence.
                if not node.from_inputs or name not in self._stages:
                    self._stages[name] = partition.stage_of(node.name)
                    self._holders.setdefault(name, set()).add(self._stages[name])
        used = {name for node in graph.nodes for name in (*node.parameters, *node.buffers)}
        used |= {name for group in graph.tied if used & set(group) for name in group}
        self.unused = [value.name for value in (*graph.parameters, *graph.buffers) if value.name not in used]
        """parameters and buffers that the example did not use"""

    def of(self, name: str) -> int:
        """The stage of a module, parameter or buffer: its own, or that of the most similar name."""
        if name in self._stages:
            return self._stages[name]
        words = name.split(".")

        def num_common(other: str) -> int:
            """How many leading words another name shares with this one."""
            same = takewhile(lambda pair: pair[0] == pair[1], zip(words, other.split("."), strict=False))
            return sum(1 for _ in same)

        most = max(map(num_common, self._stages))
        if not most:
            return next(iter(self._stages.values()))
        similar = [other for other in self._stages if num_common(other) == most]
        position = self._positions.get(name, len(self._positions))
        later = [other for other in similar if self._positions.get(other, -1) > position]
        if later:
            return self._stages[min(later, key=self._positions.__getitem__)]
        return self._stages[max(similar, key=lambda other: self._positions.get(other, -1))]

    def is_within_one_stage(self, module: str) -> bool:
        """Whether no stage but the owner of a module uses parameters or buffers in it."""
        inside, owner = f"{module}.", {self.of(module)}
        return all(stages <= owner for name, stages in self._holders.items() if name.startswith(inside))

    def by_stage(self, names: Iterable[str]) -> dict[int, list[str]]:
        """The names that belong to each stage."""
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self.of(name), []).append(name)
        return found

    def fit(self, graph: Graph) -> Partition:
        """The partition of another graph of the same model: new nodes go where their state or their values are."""
        if _node_keys(graph) == self._nodes:
            return self._partition
        owned = {name: stage for stage, names in enumerate(self._partition.stages) for name in names}
        latest = self._latest_stages(graph, owned)
        placed: dict[str, int] = {}
        for node in graph.nodes:
            makers = [graph.makers[value] for value in node.reads if value in graph.makers]
            # Every stage runs nodes that depend on the inputs alone.
            earliest = max((placed[maker.name] for maker in makers if not maker.from_inputs), default=0)
            # The same name may be another call here (`/add@3`), so its old stage is only a preference.
            preferred = min(max(owned.get(node.name, 0), earliest), max(latest[node.name], earliest))
            if node.is_block and node.name in owned:
                placed[node.name] = owned[node.name]
            elif node.parameters or (node.is_block and node.buffers):
                placed[node.name] = self._stage_of_state(node, earliest, preferred)
            else:
                placed[node.name] = preferred
        stages = tuple(
            tuple(name for name, at in placed.items() if at == stage) for stage in range(self._partition.num_stages)
        )
        return FittedPartition(stages)

    def _latest_stages(self, graph: Graph, owned: dict[str, int]) -> dict[str, int]:
        """The last stage in which each node may be, so that all nodes that read its values are in it or later."""
        latest: dict[str, int] = {}
        last = self._partition.num_stages - 1
        bound = dict.fromkeys((value.name for node in graph.nodes for value in node.makes), last)
        for node in reversed(graph.nodes):
            stage = min((bound[value.name] for value in node.makes), default=last)
            if node.is_block and node.name in owned:
                stage = owned[node.name]
            latest[node.name] = stage
            for value in node.reads:
                if value in bound:
                    bound[value] = min(bound[value], stage)
        return latest

    def _stage_of_state(self, node: Node, earliest: int, preferred: int) -> int:
        """The stage nearest to the preferred one that has all parameters of a node and does not run too early."""
        holders = [self._holders.get(name) or {self.of(name)} for name in node.parameters or node.buffers]
        possible = [stage for stage in set.intersection(*holders) if stage >= earliest]
        if not possible:
            raise PartitionError(
                "this batch needs a part of the model in a stage that has already run",
                node=node.name,
                owned_by=sorted(set.union(*holders)),
                earliest=earliest,
                hint="plan with a batch of this kind as the example, and with the same basic_blocks",
            )
        return min(possible, key=lambda stage: abs(stage - preferred))


def parameter_ranks(plan: Plan) -> dict[str, set[int]]:
    """The ranks that use each parameter, in the order of the graph; tied ones under their first name."""
    users: dict[str, set[int]] = {}
    for index, nodes in enumerate(plan.partition.runs(plan.graph)):
        for node in nodes:
            for name in node.parameters:
                users.setdefault(plan.graph.tensor_of(name), set()).add(plan.schedule.placement[index])
    return users


def _node_keys(graph: Graph) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(node.name, node.kind, node.reads) for node in graph.nodes]
