"""The door from a model and a cluster to a plan."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.capture import Captured
from penstock.capture import capture as record_model
from penstock.errors import PlanError
from penstock.ir.cluster import Cluster, parse_bytes
from penstock.ir.figures import whole
from penstock.ir.graph import Graph
from penstock.ir.liveness import trained
from penstock.ir.partition import Partition
from penstock.ir.plan import Plan
from penstock.ir.profile import Profile
from penstock.ir.schedule import Schedule
from penstock.planner import Request, estimate, make
from penstock.runtime.batch import Split, cut
from penstock.training.roots import roots_of

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
    split: Split | None = None,
) -> Plan:
    """How to train the model as a pipeline, from one example batch: cuts, schedule, predicted time and memory.

    `schedule` is a name, a Schedule or a path to a CSV; `partitioner` a name, a Partition, or lists of module names
    per stage. With a `loss_fn`, gradients of all outputs are predicted to return, else of the loss among them. `split`
    is that of the Pipeline: along which dimension arguments are cut, None for whole.
    """
    cluster = ranks if isinstance(ranks, Cluster) else Cluster(_count("ranks", ranks))
    count = _microbatches(microbatches, cluster)
    graph = _graph(_example(model, (args, kwargs), count, split), loss_fn)
    limits = (parse_bytes(memory),) * cluster.ranks if memory is not None else cluster.limits
    request = Request(cluster, count, _schedule(schedule), partitioner, stages_per_rank, recompute, limits)
    return make(graph, profile or estimate(graph), request)


def _graph(captured: Captured, loss_fn: LossFn | None) -> Graph:
    """The graph of a microbatch; gradients return of what the loss is made of, all outputs for a `loss_fn`."""
    return trained(captured.graph, roots_of(captured, loss_fn is not None), captured.first.adding)


def _example(
    model: nn.Module, batch: tuple[Any, Mapping[str, Any] | None], count: int, split: Split | None
) -> Captured:
    args, kwargs = batch
    if not isinstance(model, nn.Module):
        raise PlanError("a plan needs a torch.nn.Module", given=type(model).__name__)
    if not isinstance(args, list | tuple):
        raise PlanError("args is a tuple of what the model is called with", given=type(args).__name__, hint="(x,)")
    first = cut(model.forward, tuple(args), dict(kwargs or {}), None, count, split)[0]
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
