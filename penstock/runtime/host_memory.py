"""Reads of values on a device, and copies to and from pinned host memory for gloo, which sends host memory only.

A device runs kernels after Python has started them, so that every read of a value waits for all kernels before it. A
copy to the host is started on the device's queue, behind the kernels that make the tensor, and must be done before
gloo may read it: one event is waited for, once for all tensors of a message. A copy to the device is started and not
waited for: later kernels are behind it on the queue, and torch keeps the pinned memory until it is done.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HOST = torch.device("cpu")


def goes_through_host(group: Any, device: torch.device) -> bool:
    """Whether messages of the device's tensors over this group go through host memory."""
    return device.type != "cpu" and group is not None and dist.get_backend(group) == "gloo"


def host_buffer(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Pinned memory of the host, from which and to which a device copies while others compute."""
    return torch.empty(shape, dtype=dtype, pin_memory=torch.accelerator.is_available())


def to_host(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of contiguous tensors in pinned memory; returns when they can be read."""
    copies = [host_buffer(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True) for tensor in tensors]
    if copies:
        copied = torch.Event(device)
        copied.record()
        copied.synchronize()
    return copies


def to_device(buffer: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for kernels that are started later."""
    return buffer.to(device, non_blocking=True)


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """The values of scalars, read at once: one wait for the device instead of one for each."""
    if not scalars:
        return []
    return torch.stack([scalar.detach().to(scalars[0].device, torch.float64) for scalar in scalars]).tolist()
