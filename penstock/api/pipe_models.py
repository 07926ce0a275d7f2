"""The door from a model to its partitioned graph in one call: record, measure, cut."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.api.measuring import measure
from penstock.api.modeling import capture
from penstock.api.partitioned import PartitionedGraph
from penstock.errors import PartitionError
from penstock.ir import Cluster, DeviceSpeed, Profile, as_int
from penstock.partitioners import Problem, divide, find
from penstock.runtime import Solo


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

    `depth` opens modules so many levels down; `basic_blocks`, names or classes, stay whole. `method` is "metis",
    "mpipe" (mixed pipe: stages that are not neighbours may share a rank), "acyclic" or "pipedream"; any other
    partitioner of the table will do too. With a Cluster that has a bandwidth, what crosses between ranks counts. With a
    `loss_fn` gradients of all outputs return, else of the loss among them. A `profile` or `speed` spares the measuring.
    """
    find(method)
    cluster = ranks if isinstance(ranks, Cluster) else _cluster(ranks)
    given = (args,) if isinstance(args, Tensor) else args
    captured = capture(model, given, kwargs, depth=depth, basic_blocks=basic_blocks)
    graph = Solo.of(captured, loss_fn is not None).graph
    if profile is None:
        profile = measure(captured, iterations=iterations, loss_fn=loss_fn, speed=speed)
    return PartitionedGraph(captured, graph, profile, divide(method, Problem(graph, profile, cluster)), method)


def _cluster(ranks: object) -> Cluster:
    count = as_int(ranks)
    if count is None or count < 1:
        raise PartitionError("ranks is a whole number, 1 or more, or a Cluster", given=repr(ranks))
    return Cluster(count)
