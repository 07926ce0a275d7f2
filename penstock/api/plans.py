"""The door from a model and a cluster to a plan."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.api.examples import Examples
from penstock.api.progress import progress
from penstock.errors import PlanError
from penstock.ir import MAX_MICROBATCHES, Cluster, DeviceSpeed, Partition, Plan, Profile, Schedule, as_int
from penstock.planner import Request, search

LossFn = Callable[[Any, Any], Tensor]
_LEAST_SEARCH, _SEARCH_ENDS = 0.2, 0.85
"""the share of the budget that is for searching, however long measuring takes, and after which nothing new is begun"""
_PER_RANK = (4, 1, 2, 8)
"""microbatches per rank that "auto" looks at, the usual number first"""


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
    split: Mapping[str, int | None] | None = None,
    speed: DeviceSpeed | None = None,
    budget_seconds: float = 10.0,
) -> Plan:
    """How to train the model as a pipeline, from one example batch: cuts, schedule, predicted time and memory.

    `schedule` is a name, a Schedule or a path to a CSV; `partitioner` a name, a Partition, or lists of module names
    per stage. What is "auto" is searched for, all together, for about `budget_seconds`; `plan.describe()` says what was
    looked at and why this was chosen. With a `loss_fn`, gradients of all outputs are predicted to return, else of the
    loss among them. `split` is that of a Pipeline. A model on the meta device is not measured: its seconds are those of
    a device of that `speed`, by default this one.
    """
    cluster = ranks if isinstance(ranks, Cluster) else Cluster(_count("ranks", ranks))
    if memory is not None:
        cluster = replace(cluster, memory=memory)
    start = time.monotonic()
    request = Request(cluster, _schedule(schedule), partitioner, stages_per_rank, recompute, budget_seconds)
    examples = Examples(model, args, kwargs, split, loss_fn, speed)
    models = examples.measured(_counts(microbatches, request, examples), profile)
    # Measuring is part of what the user waits for, and what is looked at last will be finished.
    left = max(_SEARCH_ENDS * budget_seconds - (time.monotonic() - start), _LEAST_SEARCH * budget_seconds)
    with progress("planning") as tell:
        return search(models, replace(request, budget_seconds=left), tell)


def _counts(given: int | str, request: Request, examples: Examples) -> list[int]:
    """The numbers of microbatches to look at; a given order has its own."""
    if given != "auto":
        return [_count("microbatches", given)]
    if isinstance(request.schedule, Schedule):
        return [request.schedule.num_microbatches]
    counts = [each * request.cluster.ranks for each in _PER_RANK]
    samples = examples.num_samples(max(counts))
    return [count for count in counts if count <= samples] or [samples]


def _count(name: str, given: object) -> int:
    number = as_int(given) if not isinstance(given, str) else None
    if number is None or number < 1:
        hint = f'{name}=4, or "auto"' if name == "microbatches" else f"{name}=4, or a penstock.Cluster"
        raise PlanError(f"{name} must be a whole number, 1 or more", given=repr(given), hint=hint)
    if name == "microbatches" and number > MAX_MICROBATCHES:
        raise PlanError("too many microbatches", given=number, hint=f"at most {MAX_MICROBATCHES}")
    return number


def _schedule(given: str | Path | Schedule) -> str | Schedule:
    """A name stays a name; what looks like a file is read."""
    if isinstance(given, Schedule):
        return given
    if isinstance(given, Path) or str(given).endswith(".csv") or "\n" in str(given):
        return Schedule.from_csv(given)
    return given
