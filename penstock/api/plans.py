"""The door from a model and a cluster to a plan."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.capture import Captured
from penstock.capture import capture as record_model
from penstock.errors import PlanError, RunError
from penstock.ir.cluster import Cluster, parse_bytes
from penstock.ir.figures import whole
from penstock.ir.graph import Graph
from penstock.ir.liveness import trained
from penstock.ir.partition import Partition
from penstock.ir.plan import Plan
from penstock.ir.profile import Profile
from penstock.ir.schedule import Schedule
from penstock.planner import Request, estimate, make
from penstock.runtime.batch import cut
from penstock.training.adding import added_in
from penstock.training.loss_value import loss_name

LossFn = Callable[[Any, Any], Tensor]
_MICROBATCHES_PER_RANK = 4


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int | Cluster,
    microbatches: int | str,
    schedule: str | Path | Schedule = "auto",
    partitioner: str | Partition | Sequence[Sequence[str]] = "auto",
    stages_per_rank: int | None = None,
    memory: int | str | None = None,
    recompute: str = "none",
    profile: Profile | None = None,
    loss_fn: LossFn | None = None,
) -> Plan:
    """How to train the model as a pipeline, from one example batch: cuts, schedule, predicted time and memory.

    `schedule` is a name, a Schedule or a path to a CSV; `partitioner` a name, a Partition, or lists of module names
    per stage. With a `loss_fn`, gradients of all outputs are predicted to return, else of the loss among them.
    """
    cluster = ranks if isinstance(ranks, Cluster) else Cluster(_count("ranks", ranks))
    count = _microbatches(microbatches, cluster)
    graph = _graph(_example(model, args, kwargs, count), loss_fn)
    limits = (parse_bytes(memory),) * cluster.ranks if memory is not None else cluster.limits
    request = Request(cluster, count, _schedule(schedule), partitioner, stages_per_rank, recompute, limits)
    return make(graph, profile or estimate(graph), request)


def _graph(captured: Captured, loss_fn: LossFn | None) -> Graph:
    """The graph of a microbatch; gradients return of what the loss is made of, all outputs for a `loss_fn`."""
    outputs = captured.graph.outputs
    if loss_fn is not None:
        return trained(captured.graph, outputs)
    try:
        return trained(captured.graph, (loss_name(captured.first), *added_in(captured.graph)))
    except RunError:
        # It returns no loss here; the loss function may yet be given to the Pipeline.
        return trained(captured.graph, outputs)


def _example(model: nn.Module, args: object, kwargs: Mapping[str, Any] | None, count: int) -> Captured:
    if not isinstance(model, nn.Module):
        raise PlanError("a plan needs a torch.nn.Module", given=type(model).__name__)
    if not isinstance(args, list | tuple):
        raise PlanError("args is a tuple of what the model is called with", given=type(args).__name__, hint="(x,)")
    first = cut(model.forward, tuple(args), dict(kwargs or {}), None, count)[0]
    return record_model(model, first.args, first.kwargs)


def _microbatches(given: int | str, cluster: Cluster) -> int:
    return _MICROBATCHES_PER_RANK * cluster.ranks if given == "auto" else _count("microbatches", given)


def _count(name: str, given: object) -> int:
    number = whole(given) if not isinstance(given, str) else None
    if number is None or number < 1:
        raise PlanError(f"{name} must be a whole number, 1 or more", given=repr(given))
    return number


def _schedule(given: str | Path | Schedule) -> str | Schedule:
    """A name stays a name; what looks like a file is read."""
    if isinstance(given, Schedule):
        return given
    if isinstance(given, Path) or str(given).endswith(".csv") or "\n" in str(given):
        return Schedule.from_csv(given)
    return given
