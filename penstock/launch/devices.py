"""The device of each local rank, and the backend that connects such devices."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import RunError

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def num_cores() -> int:
    """The number of cores that this process may use; of the machine where the system does not say (macOS, Windows)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_devices(kind: str, processes: int) -> None:
    """Raise RunError if this machine has no device of a type, or fewer than local processes."""
    if kind == "cpu":
        return
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind:
        found = "cpu" if accelerator is None else accelerator.type
        raise RunError("device must be one of this machine", got=kind, found=found, hint=f"--device {found}")
    count = torch.accelerator.device_count()
    if count < processes:
        hint = f"--ranks {count}" if count > 1 else "--device cpu"
        raise RunError("every rank needs a device of its own", ranks=processes, devices=count, hint=hint)


def use_local_device(kind: str) -> torch.device:
    """Make the device with the number of this process on its host the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", 0))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def pipeline_mesh(kind: str, replicas: int, ranks: int) -> DeviceMesh:
    """The mesh of the replicas ("dp") and the ranks of each ("pp"), over the backend of the device.

    The default group may have another backend: `launch` and `penstock train` connect processes by gloo.
    """
    backend = _BACKENDS.get(kind, "gloo")
    mesh = torch.arange(replicas * ranks, device="cpu").view(replicas, ranks)
    groups = [dist.new_subgroups_by_enumeration(rows.tolist(), backend=backend)[0] for rows in (mesh.T, mesh)]
    return DeviceMesh.from_group(groups, kind, mesh=mesh, mesh_dim_names=("dp", "pp"))
