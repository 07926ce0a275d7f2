"""plan and plan_together: search for the best plan of a model, from one example batch."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import errors
from penstock.api.measuring import measure, measure_links
from penstock.api.pipeline import check_loss_fn, check_split
from penstock.api.progress import progress
from penstock.capture import Captured, Microbatch, split_batch
from penstock.capture import capture as record_model
from penstock.errors import PenstockError, PlanError, RunError
from penstock.ir import (
    Cluster,
    DeviceSpeed,
    Graph,
    Partition,
    Plan,
    Profile,
    Schedule,
    from_json,
    to_json,
)
from penstock.launch import host_id, one_line
from penstock.planner import Measured, PlanOptions, interpolate_profile, search
from penstock.runtime import measured_model

LossFn = Callable[[Any, Any], Tensor]
# Shares of the budget: searching gets at least the first, however long measuring takes; after the second no new
# candidate is started.
_LEAST_SEARCH, _SEARCH_ENDS = 0.2, 0.85
_PER_RANK = (4, 1, 2, 8)  # microbatches per rank that "auto" considers, the usual number first
_SLOW_SECONDS = 2.0  # if measuring one size of microbatch takes longer than this, no other size is measured
_GROUP_TIMEOUT = timedelta(minutes=30)  # ranks wait this long for the plan of the first; its death is noticed at once
_HOST_BYTES, _CORE_BYTES = 4, 128


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
    """Search for the best plan: cuts, placement, schedule, microbatches and recomputation.

    `args` and `kwargs` are one example batch. `schedule` is a name, a Schedule or the path of a CSV file; `partitioner`
    a name, a Partition, or lists of module names per stage. Everything that is "auto" is searched together for about
    `budget_seconds`; `plan.describe()` shows the candidates. With a `loss_fn`, the prediction sends gradients of all
    outputs back, else of the loss among them. `split` is that of a Pipeline. A model on the meta device is not
    measured but estimated for a device of the given `speed`, by default this one.
    """
    start = time.monotonic()
    options = PlanOptions(
        ranks, microbatches, schedule, partitioner, stages_per_rank, memory, recompute, budget_seconds
    )
    examples = Examples(model, args, kwargs, split, loss_fn, speed)
    models = examples.measured(_microbatch_counts(options, examples), profile)
    # Measuring counts towards the budget that the user waits for.
    left = max(_SEARCH_ENDS * budget_seconds - (time.monotonic() - start), _LEAST_SEARCH * budget_seconds)
    with progress("planning") as tell:
        return search(models, replace(options, budget_seconds=left), tell)


def _microbatch_counts(options: PlanOptions, examples: "Examples") -> list[int]:
    """The numbers of microbatches to consider; a given schedule has its own."""
    if isinstance(options.microbatches, int):
        return [options.microbatches]
    if isinstance(options.schedule, Schedule):
        return [options.schedule.num_microbatches]
    counts = [each * options.cluster.ranks for each in _PER_RANK]
    samples = examples.num_samples(max(counts))
    return [count for count in counts if count <= samples] or [samples]


@dataclass(frozen=True)
class Examples:
    """One example batch of a model, which is split into microbatches of the sizes that a plan may use."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    split: Mapping[str, int | None] | None = None
    loss_fn: LossFn | None = None
    speed: DeviceSpeed | None = None
    """estimate for a device of this speed instead of measuring"""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            hint = "penstock.plan(model, args, ranks=..., microbatches=...)"
            raise PlanError("model must be a torch.nn.Module", got=type(self.model).__name__, hint=hint)
        if not isinstance(self.args, list | tuple):
            given = type(self.args).__name__
            raise PlanError("args must be a tuple of the model's arguments", got=given, hint="(x,)")
        if self.kwargs is not None and not isinstance(self.kwargs, Mapping):
            given = type(self.kwargs).__name__
            raise PlanError("kwargs must be a dict of the model's arguments", got=given, hint='{"mask": mask}')
        if self.speed is not None and not isinstance(self.speed, DeviceSpeed):
            hint = "penstock.measure_speed(), or penstock.DeviceSpeed(...)"
            raise PlanError("speed must be a DeviceSpeed", got=repr(self.speed), hint=hint)
        check_loss_fn(self.model, self.loss_fn)
        check_split(self.split, self.model)

    def measured(self, counts: Sequence[int], profile: Profile | None) -> dict[int, Measured]:
        """Measure the model for the numbers of microbatches, at least for the first.

        Besides the first, the largest and the smallest number are measured, others are interpolated. With a given
        profile, only the size that it was measured for can be planned.
        """
        if profile is not None:
            return self._with_profile(counts, profile)
        start = time.monotonic()
        found = {counts[0]: self._measured(counts[0])}
        if len(counts) == 1 or time.monotonic() - start > _SLOW_SECONDS:
            return found
        ends = (min(counts), max(counts))
        found |= {count: self._measured(count) for count in ends if count not in found}
        found |= {count: self._interpolated(count, ends, found) for count in counts if count not in found}
        return found

    def _measured(self, count: int) -> Measured:
        captured = self._captured(count)
        return Measured(self._graph(captured), measure(captured, loss_fn=self.loss_fn, speed=self.speed))

    def _interpolated(self, count: int, ends: tuple[int, int], known: Mapping[int, Measured]) -> Measured:
        captured = self._captured(count)
        graph, sizes = self._graph(captured), [self._first(each).size for each in (ends[0], count, ends[1])]
        share = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0]) if sizes[2] != sizes[0] else 0.0
        one, other = (known[end].profile for end in ends)
        try:
            return Measured(graph, interpolate_profile(graph, share, one, other))
        except PlanError:
            # The model takes another path for this size, so its nodes differ.
            return Measured(graph, measure(captured, loss_fn=self.loss_fn, speed=self.speed))

    def _with_profile(self, counts: Sequence[int], profile: Profile) -> dict[int, Measured]:
        if not isinstance(profile, Profile):
            hint = "penstock.measure(penstock.capture(model, args)), or None to measure here"
            raise PlanError("profile must be a Profile", got=type(profile).__name__, hint=hint)
        graphs = {count: self._graph(self._captured(count)) for count in counts}
        found = {count: graph for count, graph in graphs.items() if graph.fingerprint == profile.fingerprint}
        if not found:
            profile.check(graphs[counts[0]])
        return {count: Measured(graph, profile) for count, graph in found.items()}

    def _first(self, count: int) -> Microbatch:
        return split_batch(self.model.forward, tuple(self.args), dict(self.kwargs or {}), None, count, self.split)[0]

    def _captured(self, count: int) -> Captured:
        first = self._first(count)
        return record_model(self.model, first.args, first.kwargs)

    def _graph(self, captured: Captured) -> Graph:
        """The graph of a microbatch, with gradients for the loss or, with a loss function, for all outputs."""
        return measured_model(captured, self.loss_fn is not None).graph

    def num_samples(self, most: int) -> int:
        """The number of samples of the batch, at most `most`."""
        return len(split_batch(self.model.forward, tuple(self.args), dict(self.kwargs or {}), None, most, self.split))


def plan_together(
    make: Callable[[Cluster], Plan],
    *,
    memory: int | str | tuple[int, ...] | None = None,
    group: Any = None,
) -> Plan:
    """Plan on the first rank of a running group and return the same plan on every rank. Collective.

    `make(cluster)` is called on the first rank, with the measured links between the ranks, the `memory` of each, and
    the cores that ranks of one host share:
    `plan_together(lambda cluster: penstock.plan(model, (x,), ranks=cluster, microbatches=8))`. The other ranks wait
    without computing. An error is raised on all ranks.
    """
    if not dist.is_initialized():
        hint = "call it in a function that penstock.launch or torchrun runs, after init_process_group"
        raise RunError("plan_together needs an initialised process group", hint=hint)
    is_first = dist.get_rank(group) == 0
    # A separate group, because planning may take longer than the timeout of the training group.
    control = dist.new_group(_global_ranks(group), _GROUP_TIMEOUT, backend="gloo", use_local_synchronization=True)
    links = measure_links(group, memory=memory, progress=None if is_first else False)
    cluster = replace(links, cores=_shared_cores(control) if dist.get_backend(group) != "nccl" else None)
    text, cause = _plan_as_text(make, cluster) if is_first else ("", None)
    result = json.loads(_broadcast_text(control, text))
    if "problem" in result:
        kind: type[PenstockError] = vars(errors)[result["kind"]]
        error = kind(result["problem"], hint=result["hint"], report=result["report"], **result["values"])
        error.is_shared = True
        raise error from cause
    return from_json(result["plan"], Plan)


def _global_ranks(group: Any) -> list[int]:
    size = dist.get_world_size(group)
    return [rank if group is None else dist.get_global_rank(group, rank) for rank in range(size)]


def _plan_as_text(make: Callable[[Cluster], Plan], cluster: Cluster) -> tuple[str, BaseException | None]:
    """The plan or the error as JSON for all ranks; and the cause, which only this rank has."""
    try:
        plan = make(cluster)
        found = plan.num_ranks if isinstance(plan, Plan) else type(plan).__name__
        if found != cluster.ranks:
            hint = "penstock.plan(model, args, ranks=cluster, microbatches=8)"
            raise PlanError("make must return a plan for all ranks", ranks=cluster.ranks, got=found, hint=hint)
        return json.dumps({"plan": to_json(plan)}), None
    except PenstockError as error:
        return json.dumps({"kind": type(error).__name__, **error.to_dict()}), error.__cause__
    except Exception as error:
        # Any exception of the model: if this rank left, the others would wait for the timeout.
        failed = PlanError("planning failed on the first rank", reason=f"{type(error).__name__}: {error}")
        return json.dumps({"kind": "PlanError", **failed.to_dict()}), error


def _broadcast_text(group: Any, text: str) -> str:
    """Broadcast the text of the first rank."""
    try:
        size = torch.tensor([len(text.encode())])
        dist.broadcast(size, group=group, group_src=0)
        data = bytearray(text.encode()) or bytearray(int(size))
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), group=group, group_src=0)
        return data.decode()
    except RuntimeError as error:
        raise RunError("the plan of the first rank was not received", reason=one_line(error)) from error


def _shared_cores(group: Any) -> int | None:
    """The number of ranks that can compute at once if a host has more ranks than cores, else None."""
    own = host_id().to_bytes(_HOST_BYTES, "little") + _own_cores().to_bytes(_CORE_BYTES, "little")
    rows = [torch.empty(len(own), dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor(list(own), dtype=torch.uint8), group=group)
    found: dict[bytes, list[int]] = {}
    for row in (bytes(row.tolist()) for row in rows):
        found.setdefault(row[:_HOST_BYTES], []).append(int.from_bytes(row[_HOST_BYTES:], "little"))
    at_once = sum(min(len(masks), reduce(or_, masks).bit_count()) for masks in found.values())
    return at_once if at_once < len(rows) else None


def _own_cores() -> int:
    """The cores that this process may use, as a bit mask."""
    if not hasattr(os, "sched_getaffinity"):
        return (1 << (os.cpu_count() or 1)) - 1
    return sum(1 << core for core in os.sched_getaffinity(0) if core < 8 * _CORE_BYTES) or 1
