"""Transports carry messages between ranks. Each is one file here, and one line in `make_transport`."""

import torch

from penstock.runtime.groups import ProcessGroups
from penstock.runtime.transports.base import MessageKey, RecvSlot, Route, SendSlot, TensorCodec, Tensors, Transport
from penstock.runtime.transports.described import DescribedTransport
from penstock.runtime.transports.distributed import DistributedTransport
from penstock.runtime.transports.local import LocalTransport

__all__ = [
    "DescribedTransport",
    "DistributedTransport",
    "LocalTransport",
    "MessageKey",
    "RecvSlot",
    "Route",
    "SendSlot",
    "TensorCodec",
    "Tensors",
    "Transport",
    "make_transport",
]


def make_transport(groups: ProcessGroups, device: torch.device) -> Transport:
    """The transport for the ranks of a pipeline."""
    if groups.is_local or groups.monitor is None:
        return LocalTransport(device)
    return DistributedTransport(groups.group, device, groups.monitor, groups.control)
