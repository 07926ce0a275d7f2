"""Messages between processes whose content the receiver does not know: a header has its shapes and dtypes.

Hand-written stages are not recorded, so the shapes of their outputs are known only after they have run. gloo itself
would not detect a mismatch. Header and content travel over the group of host tensors: on a transport without tags, as
NCCL is, the receive of the content would have to be issued before its header has arrived.
"""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.capture import spec_of
from penstock.errors import RunError
from penstock.ir import TensorSpec, Value
from penstock.runtime.groups import CONTENT_TAG, HEADER_TAG, ProcessGroups
from penstock.runtime.host_memory import HOST, to_device, to_host
from penstock.runtime.transports.base import MessageKey, RecvSlot, Route, SendSlot, TensorCodec
from penstock.runtime.transports.distributed import WorkSendSlot, WorkTransport

HEADER_BYTES = 4096


class DescribedTransport(WorkTransport):
    """Sends any number of tensors of any shape in each message; the codecs of a route are not used."""

    def __init__(self, groups: ProcessGroups, device: torch.device) -> None:
        super().__init__(groups.control, device, groups.monitor)
        self.step_number = 0
        """equal on all ranks: a message of an interrupted step is not taken for one of this step"""
        self.posted: dict[int, deque[_RecvSlot]] = {}
        """by rank, receives whose content was not posted yet, in the order in which the rank sends"""

    def send_slot(self, route: Route) -> SendSlot:
        return _SendSlot(route, self)

    def recv_slot(self, route: Route) -> RecvSlot:
        return _RecvSlot(route, self)

    def clear(self) -> None:
        """Drop messages in transit."""
        super().clear()
        self.posted.clear()


class _SendSlot(WorkSendSlot):
    __slots__ = ()
    _transport: DescribedTransport

    def send(self) -> None:
        tensors, self._tensors = self._tensors, ()
        specs = [None if tensor is None else spec_of(tensor) for tensor in tensors]
        self._send(_header(specs, self._transport.step_number, self.route.key), HEADER_TAG)
        for tensor, spec in zip(tensors, specs, strict=True):
            if tensor is not None and spec is not None and tensor.numel():
                packed = TensorCodec(Value("value", spec)).pack(tensor, HOST)
                self._send(packed if packed.is_cpu else to_host([packed], packed.device)[0], CONTENT_TAG)

    def _send(self, content: Tensor, tag: int) -> None:
        self._packed.append(content)
        self._works.append(self._transport.start(self._transport.group.send, content, tag, self.route))


class _RecvSlot(RecvSlot):
    __slots__ = ("_buffers", "_codecs", "_header", "_header_work", "_transport", "_works")

    def __init__(self, route: Route, transport: DescribedTransport) -> None:
        super().__init__(route)
        self._transport = transport
        self.clear()  # declares the attributes of a message

    def post(self) -> None:
        """Post the receive of the header; that of the content follows once the header is here."""
        transport, peer = self._transport, self.route.peer
        self._header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._header_work = transport.start(transport.group.recv, self._header, HEADER_TAG, self.route)
        transport.posted.setdefault(peer, deque()).append(self)

    def wait(self) -> None:
        transport, peer = self._transport, self.route.peer
        transport.monitor.waiting(self.route.code, peer)
        # Contents are received in the order in which they are sent, which is that of the headers.
        while self._header is not None:
            transport.posted[peer].popleft().post_content()
        transport.wait(self._works, self.route)
        device, pairs = transport.device, zip(self._codecs, self._buffers, strict=True)
        self.received = [None if codec is None else codec.unpack(to_device(buffer, device)) for codec, buffer in pairs]
        self._works, self._buffers, self._codecs = [], [], []

    def post_content(self) -> None:
        """Wait for the header and post receives of the tensors that it describes."""
        transport = self._transport
        transport.wait([self._header_work], self.route)
        specs = _read_header(self._header, transport.step_number, self.route.key)
        self._header, self._header_work = None, None
        is_gradient = self.route.key[0] > self.route.key[1]
        for spec in specs:
            codec = None if spec is None else TensorCodec(Value("value", spec), is_gradient)
            is_pinned = transport.device.type != "cpu"
            buffer = torch.empty(0) if codec is None else codec.buffer(HOST, is_pinned)
            self._codecs.append(codec)
            self._buffers.append(buffer)
            if codec is not None and not codec.is_empty:
                self._works.append(transport.start(transport.group.recv, buffer, CONTENT_TAG, self.route))

    def clear(self) -> None:
        super().clear()
        self._header: Tensor | None = None
        self._header_work: Any = None
        self._works: list[Any] = []
        self._buffers: list[Tensor] = []
        self._codecs: list[TensorCodec | None] = []


def _header(specs: Sequence[TensorSpec | None], step_number: int, key: MessageKey) -> Tensor:
    rows = [spec and [spec.dtype, spec.shape, spec.requires_grad, spec.order] for spec in specs]
    data = json.dumps([step_number, key, rows]).encode()
    if len(data) > HEADER_BYTES:
        problem, hint = f"the header of a message must have at most {HEADER_BYTES} bytes", "stack or concatenate values"
        raise RunError(problem, got=len(data), values=len(specs), stages=key[:2], hint=hint)
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES)), dtype=torch.uint8)


def _read_header(header: Tensor, step_number: int, key: MessageKey) -> list[TensorSpec | None]:
    found_number, found_key, rows = json.loads(header.numpy().tobytes())
    if (found_number, tuple(found_key)) != (step_number, key):
        raise RunError(
            "received a message of another call, probably one that failed",
            expected=(step_number, *key),
            found=(found_number, *found_key),
            hint="restart the processes",
        )
    return [row and TensorSpec(tuple(row[1]), row[0], row[2], tuple(row[3])) for row in rows]
