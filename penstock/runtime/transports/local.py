"""Messages between ranks that are all in this process."""

import torch
from torch import Tensor

from penstock.runtime.transports.base import MessageKey, RecvSlot, Route, SendSlot, Tensors, Transport


class LocalTransport(Transport):
    """Keeps each message in a dictionary from when it is sent until it is taken."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.messages: dict[MessageKey, list[Tensor | None]] = {}

    def send_slot(self, route: Route) -> SendSlot:
        """The sending end of a message."""
        return _SendSlot(route, self)

    def recv_slot(self, route: Route) -> RecvSlot:
        """The receiving end of a message."""
        return _RecvSlot(route, self)

    def clear(self) -> None:
        """Drop all messages."""
        super().clear()
        self.messages.clear()


class _SendSlot(SendSlot):
    __slots__ = ("_tensors", "_transport")

    def __init__(self, route: Route, transport: LocalTransport) -> None:
        super().__init__(route)
        self._transport = transport
        self._tensors: Tensors = ()

    def put(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def send(self) -> None:
        # Packed and unpacked as between processes, so that layouts and checks are the same.
        pairs = zip(self.route.codecs, self._tensors, strict=True)
        device = self._transport.device
        self._transport.messages[self.route.key] = [
            None if tensor is None and codec.is_optional else codec.unpack(codec.pack(tensor, device))
            for codec, tensor in pairs
        ]
        self._tensors = ()

    def release(self) -> None:
        """No-op: `send` has delivered the message."""

    def finish(self) -> None:
        """No-op: `send` has delivered the message."""

    @property
    def held(self) -> list[Tensor]:
        return [tensor for tensor in self._tensors if tensor is not None]

    def clear(self) -> None:
        self._tensors = ()


class _RecvSlot(RecvSlot):
    __slots__ = ("_transport",)

    def __init__(self, route: Route, transport: LocalTransport) -> None:
        super().__init__(route)
        self._transport = transport

    def post(self) -> None:
        """No-op: a message needs no buffer here."""

    @property
    def is_ready(self) -> bool:
        return self.route.key in self._transport.messages

    def wait(self) -> None:
        """No-op: the executor only runs actions whose messages have arrived."""

    def take(self) -> Tensors:
        return self._transport.messages.pop(self.route.key)

    @property
    def held(self) -> list[Tensor]:
        return []

    def clear(self) -> None:
        """No-op: the transport drops all messages at once."""
