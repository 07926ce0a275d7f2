"""Transports carry messages between ranks; `make_transport` chooses one.

To add one, write a file with a subclass of `Transport`, choose it in `make_transport`, and if users may ask for it add
its name to TRANSPORTS in `penstock/runtime/options.py`. Files in reading order:

    base.py            the contract, and how tensors become bytes
    local.py           all ranks in one process
    distributed.py     torch.distributed: gloo, NCCL
    shared_memory.py   ranks on the CPUs of one host; ring.py: the memory; links.py: the sockets that pass and watch it
    described.py       messages with a header of shapes and dtypes, for hand-written stages; over the gloo group
"""

import logging

import torch

from penstock.errors import RunError
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.sync import VOTE_BYTES
from penstock.runtime.transports.base import MessageKey, RecvSlot, Route, SendSlot, TensorCodec, Tensors, Transport
from penstock.runtime.transports.described import DescribedTransport
from penstock.runtime.transports.distributed import DistributedTransport
from penstock.runtime.transports.links import connect
from penstock.runtime.transports.local import LocalTransport
from penstock.runtime.transports.shared_memory import SharedMemoryTransport

_LOG = logging.getLogger(__name__)


def make_transport(groups: ProcessGroups, device: torch.device, choice: str = "auto") -> Transport:
    """The transport for the ranks of a pipeline; collective if they are processes. `choice`: see `RunOptions`."""
    if groups.is_local:
        return LocalTransport(device)
    remote = DistributedTransport(groups.group, device, groups.monitor, groups.control)
    if choice == "distributed" or groups.num_ranks == 1:
        return remote
    if groups.connections is None:
        # The largest message of a sync has the votes of all ranks.
        groups.connections = connect(groups, device, groups.num_ranks * VOTE_BYTES)
    links, missing = groups.connections
    for (rank, other), reason in missing.items():
        if choice == "shared":
            raise RunError(
                'with transport="shared" all ranks must be on the CPUs of one host',
                ranks=(rank, other),
                reason=reason,
                hint='RunOptions(transport="auto"), which uses shared memory where it can',
            ).on_all_ranks()
        if groups.rank in (rank, other):
            _LOG.info("ranks %d and %d use torch.distributed, not shared memory: %s", rank, other, reason)
    return SharedMemoryTransport(links, remote, device, groups.monitor) if links else remote
