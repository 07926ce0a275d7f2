"""Planning together: running ranks measure the links between them, the first one plans, and all take its plan."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock import errors
from penstock.api.measuring import measure_links
from penstock.errors import PenstockError, PlanError, RunError
from penstock.ir import Cluster, Plan, from_json, to_json
from penstock.launch import host_id, one_line

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
