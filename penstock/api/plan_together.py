"""plan_together: plan on the first rank of a running process group, with measured links, for all of its ranks."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist

from penstock import errors
from penstock.api.measuring import measure_links
from penstock.errors import PenstockError, PlanError, RunError
from penstock.ir import Cluster, LinkSpeed, Plan, Replicas, from_json, to_json
from penstock.launch import host_id, one_line
from penstock.runtime import EXPERTS, PIPELINE, REPLICAS, mesh_sizes

_GROUP_TIMEOUT = timedelta(minutes=30)  # ranks wait this long for the plan of the first; its death is noticed at once
_HOST_BYTES, _CORE_BYTES = 4, 128  # of the id of a host, and of a bit mask of cores


def plan_together(
    make: Callable[[Cluster], Plan],
    *,
    memory: int | str | tuple[int, ...] | None = None,
    group: Any = None,
    mesh: Any = None,
) -> Plan:
    """Plan on the first rank of a running group and return the same plan on every rank. A collective call.

    `plan_together(lambda cluster: penstock.plan(model, (x,), ranks=cluster, microbatches=8))`. The other ranks wait
    without computing. An error is raised on all ranks.

    Args:
        make: called on the first rank with a Cluster: the measured links between the ranks, their memory, and the cores
            that ranks of one host share; returns the plan
        memory: memory of a rank, in bytes or as "24GiB", one value or one per rank; None: no limit
        group: the process group; None: all processes
        mesh: instead of a group, the DeviceMesh that the Pipeline will get: the Cluster has the ranks along its axis
            "pp", and as replicas those along "dp"; all of them get the plan

    Returns:
        The plan, equal on all ranks.

    Raises:
        RunError: without an initialised process group
        PlanError: if planning failed on the first rank
    """
    if not dist.is_initialized():
        hint = "call it in a function that penstock.launch or torchrun runs, after init_process_group"
        raise RunError("plan_together needs an initialised process group", hint=hint)
    if mesh is not None and group is not None:
        raise RunError("group and mesh must not both be given", hint="leave out one of them")
    ranks = dist.get_process_group_ranks(group) if mesh is None else mesh.mesh.flatten().tolist()
    num_replicas = 1 if mesh is None else mesh_sizes(mesh)[1]
    is_first = dist.get_rank() == ranks[0]
    # A separate group, because planning may take longer than the timeout of the training group.
    control = dist.new_group(ranks, _GROUP_TIMEOUT, backend="gloo", use_local_synchronization=True)
    pipeline = group if mesh is None else mesh.get_group(PIPELINE)
    cluster = measure_links(pipeline, memory=memory, progress=None if is_first else False)
    if num_replicas > 1:
        # All pipelines measure at once, as they will communicate.
        axis = REPLICAS if REPLICAS in mesh.mesh_dim_names and mesh[REPLICAS].size() > 1 else EXPERTS
        between = measure_links(mesh.get_group(axis), progress=False).links
        cluster = replace(cluster, replicas=Replicas.over(num_replicas, LinkSpeed.slowest(between)))
    if dist.get_backend(pipeline) != "nccl" and (cores := _shared_cores(control)) is not None:
        cluster = replace(cluster, cores=max(1, cores // num_replicas))
    text, cause = _plan_as_text(make, cluster) if is_first else ("", None)
    result = json.loads(_broadcast_text(control, text))
    if "problem" in result:
        kind: type[PenstockError] = vars(errors)[result["kind"]]
        raise kind.from_dict(result) from cause
    return from_json(result["plan"], Plan)


def _plan_as_text(make: Callable[[Cluster], Plan], cluster: Cluster) -> tuple[str, BaseException | None]:
    """The plan or the error as JSON for all ranks; and the cause, which only this rank has."""
    try:
        plan = make(cluster)
        got = plan.num_ranks if isinstance(plan, Plan) else type(plan).__name__
        if got != cluster.ranks:
            hint = "penstock.plan(model, args, ranks=cluster, microbatches=8); with replicas: plan_together(mesh=)"
            raise PlanError("make must return a plan for all ranks", ranks=cluster.ranks, got=got, hint=hint)
        return json.dumps({"plan": to_json(plan)}), None
    except PenstockError as error:
        # The class that all ranks know: that of the error may be a subclass of the user's.
        kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in vars(errors))
        return json.dumps({"kind": kind, **error.to_dict()}), error.__cause__
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
    if hasattr(os, "sched_getaffinity"):
        own_cores = sum(1 << core for core in os.sched_getaffinity(0) if core < 8 * _CORE_BYTES) or 1
    else:
        own_cores = (1 << (os.cpu_count() or 1)) - 1
    row = host_id().to_bytes(_HOST_BYTES, "little") + own_cores.to_bytes(_CORE_BYTES, "little")
    rows = [torch.empty(len(row), dtype=torch.uint8) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor(list(row), dtype=torch.uint8), group=group)
    masks_by_host: dict[bytes, list[int]] = {}
    for received in (bytes(tensor.tolist()) for tensor in rows):
        mask = int.from_bytes(received[_HOST_BYTES:], "little")
        masks_by_host.setdefault(received[:_HOST_BYTES], []).append(mask)
    at_once = sum(min(len(masks), reduce(or_, masks).bit_count()) for masks in masks_by_host.values())
    return at_once if at_once < len(rows) else None
