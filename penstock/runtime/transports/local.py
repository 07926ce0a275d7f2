"""Messages between ranks that are all in this process."""

from collections import deque

import torch
from torch import Tensor

from penstock.runtime.transports.base import MessageKey, RecvSlot, Route, SendSlot, Tensors, Transport


class LocalTransport(Transport):
    """Keeps each message from when it is sent until it is taken; those with the same key are taken in order."""

    def __init__(self, device: torch.device, is_stream: bool = False) -> None:
        """`is_stream`: messages between two stages are told apart by their order, not by their microbatch."""
        super().__init__(device)
        self._is_stream = is_stream
        self.messages: dict[MessageKey, deque[list[Tensor | None]]] = {}

    def queue(self, route: Route) -> deque[list[Tensor | None]]:
        """The messages of a route that were sent and not taken yet."""
        source, target, microbatch = route.key
        return self.messages.setdefault((source, target, 0 if self._is_stream else microbatch), deque())

    def send_slot(self, route: Route) -> SendSlot:
        return _SendSlot(route, self)

    def recv_slot(self, route: Route) -> RecvSlot:
        return _RecvSlot(route, self)

    def clear(self) -> None:
        """Drop all messages."""
        super().clear()
        self.messages.clear()


class _SendSlot(SendSlot):
    __slots__ = ("_transport",)

    def __init__(self, route: Route, transport: LocalTransport) -> None:
        super().__init__(route)
        self._transport = transport

    def send(self) -> None:
        # Packed and unpacked as between processes, so that layouts and checks are the same.
        pairs = zip(self.route.codecs, self._tensors, strict=True)
        device = self._transport.device
        self._transport.queue(self.route).append(
            [
                None if tensor is None and codec.is_optional else codec.unpack(codec.pack(tensor, device))
                for codec, tensor in pairs
            ]
        )
        self._tensors = ()

    def release(self) -> None:
        """No-op: `send` has delivered the message."""

    def finish(self) -> None:
        """No-op: `send` has delivered the message."""


class _RecvSlot(RecvSlot):
    __slots__ = ("_transport",)

    def __init__(self, route: Route, transport: LocalTransport) -> None:
        super().__init__(route)
        self._transport = transport

    def post(self) -> None:
        """No-op: a message needs no buffer here."""

    @property
    def is_ready(self) -> bool:
        return bool(self._transport.queue(self.route))

    def wait(self) -> None:
        """No-op: the executor only runs actions whose messages have arrived."""

    def take(self) -> Tensors:
        return self._transport.queue(self.route).popleft()
