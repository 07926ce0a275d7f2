"""The device of each local rank, and the backend that connects such devices."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PlanError

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def num_cores() -> int:
    """The number of cores that this process may use; all cores on systems without CPU affinity (macOS, Windows)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_devices(kind: str, processes: int) -> None:
    """Raise PlanError if this machine has no device of type `kind`, or fewer of them than local processes."""
    if kind == "cpu":
        return
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind:
        found = "cpu" if accelerator is None else accelerator.type
        raise PlanError("device must be one of this machine", got=kind, found=found, hint=f"--device {found}")
    count = torch.accelerator.device_count()
    if count < processes:
        hint = f"--ranks {count}" if count > 1 else "--device cpu"
        raise PlanError("every rank needs a device of its own", ranks=processes, devices=count, hint=hint)


def use_local_device(kind: str) -> torch.device:
    """Make the device of this process the current one: the one with its local rank as index."""
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def group_device(group: Any = None) -> torch.device:
    """The device of the tensors that a group sends: the CPU for gloo or without an accelerator, else the current one.

    `init_process_group()` without a backend makes a group of several, one for each kind of device.
    """
    accelerator = torch.accelerator.current_accelerator()
    if dist.get_backend(group) == "gloo" or accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def pipeline_mesh(kind: str, replicas: int, ranks: int) -> DeviceMesh:
    """The mesh of the replicas ("dp") and the ranks of each ("pp"), over the backend of the device.

    The default group may have another backend: `launch` and `penstock train` connect processes by gloo.
    """
    backend = _BACKENDS.get(kind, "gloo")
    mesh = torch.arange(replicas * ranks, device="cpu").view(replicas, ranks)
    # The columns of the mesh are the groups of "dp", its rows those of "pp".
    groups = [dist.new_subgroups_by_enumeration(rows.tolist(), backend=backend)[0] for rows in (mesh.T, mesh)]
    return DeviceMesh.from_group(groups, kind, mesh=mesh, mesh_dim_names=("dp", "pp"))
