"""Messages between processes, over send and receive of a torch.distributed process group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.groups import ProcessGroups
from penstock.runtime.host_memory import HOST, goes_through_host, to_device, to_host
from penstock.runtime.monitor import RankMonitor
from penstock.runtime.transports.base import RecvSlot, Route, SendSlot, Transport, apply_flags, flags_of


class WorkTransport(Transport):
    """A transport whose messages are operations of a process group."""

    def __init__(self, group: Any, device: torch.device, monitor: RankMonitor) -> None:
        super().__init__(device)
        self.group, self.monitor = group, monitor

    def start(self, operation: Callable[..., Any], tensor: Tensor, tag: int, route: Route) -> Any:
        """Start to send or receive a part of a message: `operation` is `send` or `recv` of a group."""
        try:
            return operation([tensor], route.peer, tag)
        except RuntimeError as error:
            # gloo raises at once if the connection is known to be closed.
            raise self.monitor.message_error(route.code, route.peer, error) from error

    def wait(self, works: Sequence[Any], route: Route) -> None:
        """Wait for parts of a message, at most until the deadline."""
        try:
            for work in works:
                self.monitor.wait(work)
        except RuntimeError as error:
            raise self.monitor.message_error(route.code, route.peer, error) from error


class WorkSendSlot(SendSlot):
    """Holds the tensors of a message until their sends are done: gloo reads from their memory until then."""

    __slots__ = ("_packed", "_transport", "_works")

    def __init__(self, route: Route, transport: WorkTransport) -> None:
        super().__init__(route)
        self._transport = transport
        self._packed: list[Tensor] = []
        self._works: list[Any] = []

    def release(self) -> None:
        # A send that was never waited for may be lost, so this waits, which takes no time for one that has arrived.
        self._transport.wait(self._works, self.route)
        self._works, self._packed = [], []

    def finish(self) -> None:
        if self._works:
            self._transport.monitor.waiting(self.route.code, self.route.peer)
            self.release()

    def clear(self) -> None:
        super().clear()
        self._works, self._packed = [], []


class DistributedTransport(WorkTransport):
    """Sends the tensors of a message one by one, in the order of the program.

    With a backend of the device, such as NCCL, sends and receives are ordered by the device's queue: nothing here waits
    for the device. Over gloo the tensors of a device go through pinned host memory.
    """

    def __init__(self, group: Any, device: torch.device, monitor: RankMonitor, control: Any = None) -> None:
        """`control`: a group of the same ranks for host tensors; None: `group`, if that is for host tensors."""
        super().__init__(group, device, monitor)
        self.control = group if control is None else control
        self.uses_host_memory = goes_through_host(group, device)
        self._is_used = False

    def send_slot(self, route: Route) -> SendSlot:
        self._is_used = True
        return _SendSlot(route, self)

    def recv_slot(self, route: Route) -> RecvSlot:
        self._is_used = True
        return _RecvSlot(route, self)

    def clear(self) -> None:
        """Drop messages in transit. The group is not used again: a later message could be mistaken for one of them."""
        super().clear()
        if self.problem is None and self._is_used:
            ProcessGroups.interrupted[id(self.group)] = self.group


class _SendSlot(WorkSendSlot):
    __slots__ = ("_has_flags",)
    _transport: DistributedTransport

    def __init__(self, route: Route, transport: DistributedTransport) -> None:
        super().__init__(route, transport)
        self._has_flags = route.has_flags

    def send(self) -> None:
        tensors, self._tensors = self._tensors, ()
        transport, route = self._transport, self.route
        packed = []
        for codec, tensor in zip(route.codecs, tensors, strict=True):
            if not codec.is_empty:
                packed.append(codec.pack(tensor, transport.device))
        if transport.uses_host_memory:
            packed = to_host(packed, transport.device)
        if self._has_flags:
            # Host tensors: to read flags from a device, the receiver would have to wait for it.
            flags = flags_of(tensors)
            self._packed.append(flags)
            self._works.append(transport.start(transport.control.send, flags, route.tag, route))
        for content in packed:
            self._packed.append(content)
            self._works.append(transport.start(transport.group.send, content, route.tag, route))


class _RecvSlot(RecvSlot):
    __slots__ = ("_buffers", "_device", "_flags", "_has_flags", "_transport", "_works")

    def __init__(self, route: Route, transport: DistributedTransport) -> None:
        super().__init__(route)
        self._transport, self._has_flags = transport, route.has_flags
        self._device = HOST if transport.uses_host_memory else transport.device
        self._works: list[Any] = []
        self._buffers: list[Tensor] = []
        self._flags: Tensor | None = None

    def post(self) -> None:
        transport, route = self._transport, self.route
        if self._has_flags:
            self._flags = torch.empty(len(route.codecs), dtype=torch.uint8)
            self._works.append(transport.start(transport.control.recv, self._flags, route.tag, route))
        for codec in route.codecs:
            buffer = codec.buffer(self._device, transport.uses_host_memory)
            self._buffers.append(buffer)
            if not codec.is_empty:
                self._works.append(transport.start(transport.group.recv, buffer, route.tag, route))

    def wait(self) -> None:
        self._transport.monitor.waiting(self.route.code, self.route.peer)
        self._transport.wait(self._works, self.route)
        codecs, buffers = self.route.codecs, self._buffers
        if self._transport.uses_host_memory:
            buffers = [to_device(buffer, self._transport.device) for buffer in buffers]
        received: list[Tensor | None] = []
        for codec, buffer in zip(codecs, buffers, strict=True):
            received.append(codec.unpack(buffer))
        if self._flags is not None:
            received = apply_flags(codecs, received, self._flags.tolist())
        self.received = received
        self._works, self._buffers, self._flags = [], [], None

    def clear(self) -> None:
        super().clear()
        self._works, self._buffers, self._flags = [], [], None
