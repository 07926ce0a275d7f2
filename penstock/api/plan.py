"""Examples: a model recorded and measured on microbatches of the sizes that a plan may use."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
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
    MAX_MICROBATCHES,
    Cluster,
    DeviceSpeed,
    Graph,
    Partition,
    Plan,
    Profile,
    Schedule,
    as_int,
    from_json,
    to_json,
)
from penstock.launch import host_id, one_line
from penstock.planner import Measured, Request, interpolate_profile, search
from penstock.runtime import measured_model

LossFn = Callable[[Any, Any], Tensor]
_PATIENCE_SECONDS = 2.0
"""if one size takes longer than this, no other is looked at"""


@dataclass(frozen=True)
class Examples:
    """One batch of a model, from which microbatches of any size are cut."""

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    split: Mapping[str, int | None] | None = None
    loss_fn: LossFn | None = None
    speed: DeviceSpeed | None = None
    """of the device that seconds are estimated for, in place of measuring"""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            hint = "penstock.plan(model, args, ranks=..., microbatches=...)"
            raise PlanError("a plan needs a torch.nn.Module", given=type(self.model).__name__, hint=hint)
        if not isinstance(self.args, list | tuple):
            given = type(self.args).__name__
            raise PlanError("args is a tuple of what the model is called with", given=given, hint="(x,)")
        if self.kwargs is not None and not isinstance(self.kwargs, Mapping):
            given = type(self.kwargs).__name__
            raise PlanError("kwargs are arguments of the model by name", given=given, hint='{"mask": mask}')
        if self.speed is not None and not isinstance(self.speed, DeviceSpeed):
            hint = "penstock.measure_speed(), or penstock.DeviceSpeed(...)"
            raise PlanError("speed is a DeviceSpeed", given=repr(self.speed), hint=hint)
        check_loss_fn(self.model, self.loss_fn)
        check_split(self.split, self.model)

    def measured(self, counts: Sequence[int], profile: Profile | None) -> dict[int, Measured]:
        """The model for each number of microbatches; the first of them in any case.

        Beside the first, the largest and the smallest are measured, and those between are told from both. With a
        profile of the user's own only the size that it was measured for can be planned.
        """
        if profile is not None:
            return self._of_profile(counts, profile)
        start = time.monotonic()
        found = {counts[0]: self._measured(counts[0])}
        if len(counts) == 1 or time.monotonic() - start > _PATIENCE_SECONDS:
            return found
        ends = (min(counts), max(counts))
        found |= {count: self._measured(count) for count in ends if count not in found}
        found |= {count: self._between(count, ends, found) for count in counts if count not in found}
        return found

    def _measured(self, count: int) -> Measured:
        captured = self._captured(count)
        return Measured(self._graph(captured), measure(captured, loss_fn=self.loss_fn, speed=self.speed))

    def _between(self, count: int, ends: tuple[int, int], known: Mapping[int, Measured]) -> Measured:
        captured = self._captured(count)
        graph, sizes = self._graph(captured), [self._first(each).size for each in (ends[0], count, ends[1])]
        share = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0]) if sizes[2] != sizes[0] else 0.0
        one, other = (known[end].profile for end in ends)
        try:
            return Measured(graph, interpolate_profile(graph, share, one, other))
        except PlanError:
            # Another size takes another way through the model.
            return Measured(graph, measure(captured, loss_fn=self.loss_fn, speed=self.speed))

    def _of_profile(self, counts: Sequence[int], profile: Profile) -> dict[int, Measured]:
        if not isinstance(profile, Profile):
            hint = "penstock.measure(penstock.capture(model, args)), or None to measure here"
            raise PlanError("profile is a Profile", given=type(profile).__name__, hint=hint)
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
        """The graph of a microbatch; gradients return of what the loss is made of, all outputs for a loss function."""
        return measured_model(captured, self.loss_fn is not None).graph

    def num_samples(self, most: int) -> int:
        """How many samples the batch has, or the most that are of interest."""
        return len(split_batch(self.model.forward, tuple(self.args), dict(self.kwargs or {}), None, most, self.split))


Make = Callable[[Cluster], Plan]
PATIENCE = timedelta(minutes=30)
"""how long the others wait for the plan of the first rank; if that rank dies they know at once"""
_HOST_BYTES, _CORE_BYTES = 4, 128


def plan_together(make: Make, *, memory: int | str | tuple[int, ...] | None = None, group: Any = None) -> Plan:
    """The plan that `make(cluster)` returns on the first rank, on every rank of a running group; all must call this.

    The cluster has the measured links between the ranks, the `memory` of each, and the cores that ranks of one host
    share: `plan_together(lambda cluster: penstock.plan(model, (x,), ranks=cluster, microbatches=8))`. Only the first
    rank calls `make`; meanwhile the others wait without computing. An error there is an error on all of them.
    """
    if not dist.is_initialized():
        hint = "call it in a function that penstock.launch or torchrun runs, after init_process_group"
        raise RunError("ranks plan together in a running group", hint=hint)
    is_first = dist.get_rank(group) == 0
    # A group of its own: planning may take longer than its user wants to wait for a message in training.
    line = dist.new_group(_ranks(group), PATIENCE, backend="gloo", use_local_synchronization=True)
    links = measure_links(group, memory=memory, progress=None if is_first else False)
    cluster = replace(links, cores=_cores(line) if dist.get_backend(group) != "nccl" else None)
    text, cause = _planned(make, cluster) if is_first else ("", None)
    said = json.loads(_told(line, text))
    if "problem" in said:
        raise _error_of(said) from cause
    return from_json(said["plan"], Plan)


def _ranks(group: Any) -> list[int]:
    """The ranks of the group as ranks of the world."""
    size = dist.get_world_size(group)
    return [rank if group is None else dist.get_global_rank(group, rank) for rank in range(size)]


def _planned(make: Make, cluster: Cluster) -> tuple[str, BaseException | None]:
    """The plan, or what is wrong, as it is told to all; and the cause, which only this rank can show."""
    try:
        plan = make(cluster)
        _check(plan, cluster)
        return json.dumps({"plan": to_json(plan)}), None
    except PenstockError as error:
        return json.dumps({"kind": type(error).__name__, **error.to_dict()}), error.__cause__
    except Exception as error:
        # Whatever the model raised: a rank that left now would keep the others waiting.
        told = PlanError("the first rank could not plan", reason=f"{type(error).__name__}: {error}")
        return json.dumps({"kind": "PlanError", **told.to_dict()}), error


def _check(plan: object, cluster: Cluster) -> None:
    found = plan.num_ranks if isinstance(plan, Plan) else type(plan).__name__
    if found != cluster.ranks:
        hint = "penstock.plan(model, args, ranks=cluster, microbatches=8)"
        raise PlanError("a plan for all ranks of the group is needed", ranks=cluster.ranks, found=found, hint=hint)


def _error_of(said: dict[str, Any]) -> PenstockError:
    kind: type[PenstockError] = vars(errors)[said["kind"]]
    error = kind(said["problem"], hint=said["hint"], report=said["report"], **said["values"])
    error.is_shared = True
    return error


def _told(line: Any, text: str) -> str:
    """The text of the first rank, on every rank."""
    try:
        size = torch.tensor([len(text.encode())])
        dist.broadcast(size, group=line, group_src=0)
        data = bytearray(text.encode()) or bytearray(int(size))
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), group=line, group_src=0)
        return data.decode()
    except RuntimeError as error:
        raise RunError("the plan of the first rank did not arrive", reason=one_line(error)) from error


def _cores(line: Any) -> int | None:
    """How many of the ranks can compute at once, where ranks of one host are more than its cores; else None."""
    own = host_id().to_bytes(_HOST_BYTES, "little") + _own_cores().to_bytes(_CORE_BYTES, "little")
    rows = [torch.empty(len(own), dtype=torch.uint8) for _ in range(dist.get_world_size(line))]
    dist.all_gather(rows, torch.tensor(list(own), dtype=torch.uint8), group=line)
    found: dict[bytes, list[int]] = {}
    for row in (bytes(row.tolist()) for row in rows):
        found.setdefault(row[:_HOST_BYTES], []).append(int.from_bytes(row[_HOST_BYTES:], "little"))
    at_once = sum(min(len(masks), _union(masks).bit_count()) for masks in found.values())
    return at_once if at_once < len(rows) else None


def _own_cores() -> int:
    """The cores that this process may use, a bit for each."""
    if not hasattr(os, "sched_getaffinity"):
        return (1 << (os.cpu_count() or 1)) - 1
    return sum(1 << core for core in os.sched_getaffinity(0) if core < 8 * _CORE_BYTES) or 1


def _union(masks: list[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


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
