"""Mail: the messages of one call between this rank and its neighbours, each with a header that says what follows.

The functions of a stage are the caller's: what they return is known when they have run. So every message begins with
a header of a fixed size, and the receiver makes room for what the header says. gloo would not notice a difference.
"""

import json
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.capture import spec_of
from penstock.errors import RunError
from penstock.ir import Message, TensorSpec, Value
from penstock.runtime import DistributedTransport, MessageKey, RecvSlot, Route, SendSlot, TensorCodec, message_key

HEADER_BYTES = 4096
_HEADER_TAG, _CONTENT_TAG = 2_000_000_021, 2_000_000_022
_HEADER = TensorCodec(Value("header", TensorSpec((HEADER_BYTES,), "uint8")))
_UNDER_WAY = 2
"""messages to one neighbour that may be under way; with one or more, 1f1b cannot block (ranks wait in turn)"""


class Mail:
    """Sends do not wait for the receiver; receivers wait when they need what comes."""

    def __init__(self, between: DistributedTransport, call: int) -> None:
        self._between, self._call = between, call
        self._expected: dict[MessageKey, RecvSlot] = {}
        self._sent: dict[int, deque[SendSlot]] = {}

    def expect(self, message: Message, code: int) -> None:
        """A header is to come: make room for it."""
        way = message_key(message)
        arrival = self._between.recv_slot(Route(code, way, message.peer, _HEADER_TAG, (_HEADER,)))
        arrival.post()
        self._expected[way] = arrival

    def take(self, way: MessageKey) -> list[Tensor]:
        """What a neighbour sent; waits for it."""
        header = self._expected.pop(way)
        header.wait()
        specs = _read(header.take()[0], self._call, way)
        is_gradient = way[0] > way[1]
        wires = tuple(TensorCodec(Value(f"value {place}", spec), is_gradient) for place, spec in enumerate(specs))
        content = self._between.recv_slot(header.route._replace(tag=_CONTENT_TAG, codecs=wires))
        content.post()
        content.wait()
        return [tensor for tensor in content.take() if tensor is not None]

    def send(self, message: Message, code: int, tensors: Sequence[Tensor]) -> None:
        """Start a message, and let go of earlier ones that have arrived."""
        way = message_key(message)
        specs = [spec_of(tensor) for tensor in tensors]
        wires = tuple(TensorCodec(Value(f"value {place}", spec)) for place, spec in enumerate(specs))
        header = Route(code, way, message.peer, _HEADER_TAG, (_HEADER,))
        waiting = self._sent.setdefault(message.peer, deque())
        text = _written(specs, self._call, way).to(self._between.device)
        for route, content in ((header, [text]), (header._replace(tag=_CONTENT_TAG, codecs=wires), tensors)):
            departure = self._between.send_slot(route)
            departure.put(content)
            departure.send()
            waiting.append(departure)
        while len(waiting) > 2 * _UNDER_WAY:
            waiting.popleft().finish()

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for waiting in self._sent.values():
            while waiting:
                waiting.popleft().finish()


def _written(specs: Sequence[TensorSpec], call: int, way: MessageKey) -> Tensor:
    rows = [[spec.dtype, spec.shape, spec.requires_grad, spec.order] for spec in specs]
    data = json.dumps([call, way, rows]).encode()
    if len(data) > HEADER_BYTES:
        hint = "stack or concatenate some of them"
        raise RunError("more values than a message has room for", values=len(specs), stages=way[:2], hint=hint)
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES)), dtype=torch.uint8)


def _read(header: Tensor | None, call: int, way: MessageKey) -> list[TensorSpec]:
    assert header is not None
    found_call, found_way, rows = json.loads(header.numpy(force=True).tobytes())
    if (found_call, tuple(found_way)) != (call, way):
        raise RunError(
            "a message of another call arrived, as happens after a call that failed",
            expected=(call, *way),
            found=(found_call, *found_way),
            hint="start the processes anew",
        )
    return [TensorSpec(tuple(shape), dtype, needs, tuple(order)) for dtype, shape, needs, order in rows]
