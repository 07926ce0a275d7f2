"""pipe_model: record, measure and cut a model in one call; the result is a PartitionedGraph."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.api.measuring import measure, measured_model
from penstock.api.models import split
from penstock.api.plan import plan
from penstock.capture import Captured, Granularity
from penstock.capture import capture as record_model
from penstock.codegen import write_stages
from penstock.errors import PartitionError
from penstock.ir import (
    Cluster,
    DeviceSpeed,
    Edge,
    Graph,
    Kind,
    Node,
    NodeCost,
    Partition,
    Placement,
    Plan,
    Profile,
    as_int,
)
from penstock.partitioners import Division, Problem, divide, find
from penstock.stages import Stage
from penstock.views import TextTable

_MS, _MB = 1e3, 1e-6


@dataclass(frozen=True)
class Metrics:
    """Measured costs of one node, or of all nodes of a stage, for one batch like the example."""

    forward_time: float
    """ms"""
    backward_time: float
    """ms, of a full backward"""
    cuda_memory_forward: float
    """MB kept from forward to backward, on any device"""
    cuda_memory_backward: float
    """MB, peak during the backward; for a stage, the largest of its nodes"""
    size: float
    """MB of parameters and buffers; a shared tensor counts for each user"""
    input_size: float
    """MB of inputs"""
    output_size: float
    """MB of outputs"""

    @classmethod
    def of(cls, cost: NodeCost) -> "Metrics":
        """The metrics of a node."""
        memory = cost.memory
        sizes = (memory.kept, memory.peak, memory.parameters + memory.buffers, memory.inputs, memory.outputs)
        forward, backward = cost.seconds_of(Kind.FORWARD), cost.seconds_of(Kind.BACKWARD)
        return cls(forward * _MS, backward * _MS, *(size * _MB for size in sizes))


@dataclass(frozen=True)
class PartitionedGraph:
    """The graph of a model with its profile and stages."""

    captured: Captured
    """the recorded model"""
    graph: Graph
    """its nodes and edges"""
    profile: Profile
    """the cost of each node"""
    division: Division
    """stages and their ranks"""
    method: str
    """name of the partitioner"""
    cluster: Cluster
    """ranks and links"""
    granularity: Granularity
    """how deep modules were opened"""
    loss_fn: Callable[..., Any] | None
    """the loss function given, if any"""
    speed: DeviceSpeed | None
    """the speed that costs were estimated for; None: measured"""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in topological order."""
        return self.graph.nodes

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The edges between nodes."""
        return self.graph.edges

    @property
    def partition(self) -> Partition:
        """The stage of each node."""
        return self.division.partition

    @property
    def placement(self) -> Placement:
        """The rank of each stage; stages that are not neighbours may share a rank, except with "acyclic"."""
        return self.division.placement

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The node names of every stage."""
        return self.partition.stages

    @cached_property
    def metrics(self) -> Mapping[str, Metrics]:
        """Metrics by node name."""
        return {node.name: Metrics.of(self.profile[node.name]) for node in self.nodes}

    def stage_of(self, node: str) -> int:
        """The stage of a node.

        Args:
            node: a name among `nodes`
        """
        for stage, names in enumerate(self.stages):
            if node in names:
                return stage
        raise PartitionError("no such node", name=repr(node), hint="a name among .nodes")

    def split(self) -> tuple[Stage, ...]:
        """The stages as modules, compared with the unsplit model first."""
        return split(self.captured, self.partition)

    def generate_code(self, path: str | Path) -> Path:
        """Write a Python file with one class per stage, in plain PyTorch and with the model's own names.

        Args:
            path: the file to write
        """
        return write_stages(self.captured, self.partition, self.placement, path)

    def plan(self, *, microbatches: int | str, **options: Any) -> Plan:
        """Plan the training of these stages on these ranks, for `penstock.Pipeline(model, plan)`.

        Partition and placement are kept; schedule and recomputation are searched. A microbatch of the example is
        measured, as its costs are not those of the batch.

        Args:
            microbatches: as in `penstock.plan`
            **options: further arguments of `penstock.plan`
        """
        args, kwargs = self.captured.example
        given = {"ranks": self.cluster, "partitioner": self.division, "loss_fn": self.loss_fn, "speed": self.speed}
        opened = {"depth": self.granularity.depth, "basic_blocks": self.granularity.basic_blocks}
        return plan(self.captured.model, args, kwargs, microbatches=microbatches, **{**given, **opened, **options})

    def __str__(self) -> str:
        shown = [field.name for field in fields(Metrics)[:5]]  # not the sizes of inputs and outputs
        rows = []
        for stage, nodes in enumerate(self.stages):
            metrics = [self.metrics[name] for name in nodes]
            sums = [sum(getattr(each, name) for each in metrics) for name in shown]
            sums[3] = max(each.cuda_memory_backward for each in metrics)  # a peak: nodes run one after another
            row = (str(stage), str(self.placement[stage]), str(len(nodes)), nodes[0], nodes[-1])
            rows.append((*row, *(f"{value:.3g}" for value in sums)))
        table = TextTable(("stage", "rank", "nodes", "from", "to", *shown), tuple(rows))
        return f"{self.method}: {self.division}\n\n{table.markdown()}"


def pipe_model(
    model: nn.Module,
    args: Tensor | Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int | Cluster,
    method: str = "mpipe",
    depth: int | None = None,
    basic_blocks: Sequence[str | type] = (),
    iterations: int = 10,
    loss_fn: Callable[..., Any] | None = None,
    profile: Profile | None = None,
    speed: DeviceSpeed | None = None,
) -> PartitionedGraph:
    """Record the model on an example batch, measure each of its nodes alone, and cut it into stages for the ranks.

    Args:
        model: any module
        args: the positional arguments of the batch, or one tensor
        kwargs: its keyword arguments
        ranks: the number of ranks, or a Cluster; with a bandwidth, the cost of messages between ranks is included
        method: "metis", "mpipe", "acyclic", "pipedream" or any other partitioner of the table; in all but "acyclic",
            stages that are not neighbours share a rank where that balances the ranks (mixed pipe)
        depth: open modules this many levels deep
        basic_blocks: modules that stay whole, by name or class
        iterations: how often each node is measured
        loss_fn: if given, gradients of all outputs are propagated, else of the loss among them
        profile: measured costs; nothing is measured then
        speed: estimate for a device of this speed instead of measuring

    Returns:
        The graph with its profile and stages.

    Raises:
        CaptureError: if the model cannot be recorded
        PartitionError: if it cannot be cut for the ranks
    """
    find(method)
    if not isinstance(ranks, Cluster):
        count = as_int(ranks)
        if count is None or count < 1:
            raise PartitionError("ranks must be a whole number, 1 or more, or a Cluster", got=repr(ranks))
        ranks = Cluster(count)
    args = (args,) if isinstance(args, Tensor) else args
    granularity = Granularity(depth, basic_blocks)
    captured = record_model(model, args, kwargs, granularity)
    graph = measured_model(captured, loss_fn is not None).graph
    if profile is None:
        profile = measure(captured, iterations=iterations, loss_fn=loss_fn, speed=speed)
    division = divide(method, Problem(graph, profile, ranks), is_mixed=True)
    return PartitionedGraph(captured, graph, profile, division, method, ranks, granularity, loss_fn, speed)
