"""Messages of one call between neighbouring ranks, each with a header of shapes and dtypes.

Stages are the caller's own functions, so the shapes of their outputs are known only after they have run. Every message
therefore begins with a header of fixed size, and the receiver allocates what the header describes. gloo itself would
not detect a mismatch.
"""

import json
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.capture import spec_of
from penstock.errors import RunError
from penstock.ir import Message, TensorSpec, Value
from penstock.runtime import MessageKey, RecvSlot, Route, SendSlot, TensorCodec, Transport, message_key

HEADER_BYTES = 4096
_HEADER_TAG, _CONTENT_TAG = 2_000_000_021, 2_000_000_022
_HEADER = TensorCodec(Value("header", TensorSpec((HEADER_BYTES,), "uint8")))
# Messages to one neighbour that may be in flight. With one or more, 1f1b cannot deadlock: ranks wait in turn.
_MAX_IN_FLIGHT = 2


class Messages:
    """Sends without waiting for the receiver; `take` waits for a message."""

    def __init__(self, transport: Transport, call: int) -> None:
        self._transport, self._call = transport, call
        self._expected: dict[MessageKey, RecvSlot] = {}
        self._sent: dict[int, deque[SendSlot]] = {}

    def expect(self, message: Message, code: int) -> None:
        """Post the receive of a header."""
        key = message_key(message)
        slot = self._transport.recv_slot(Route(code, key, message.peer, _HEADER_TAG, (_HEADER,)))
        slot.post()
        self._expected[key] = slot

    def take(self, key: MessageKey) -> list[Tensor]:
        """Wait for a message and return its tensors."""
        header = self._expected.pop(key)
        header.wait()
        specs = _read_header(header.take()[0], self._call, key)
        is_gradient = key[0] > key[1]
        codecs = tuple(TensorCodec(Value(f"value {index}", spec), is_gradient) for index, spec in enumerate(specs))
        content = self._transport.recv_slot(header.route._replace(tag=_CONTENT_TAG, codecs=codecs))
        content.post()
        content.wait()
        return [tensor for tensor in content.take() if tensor is not None]

    def send(self, message: Message, code: int, tensors: Sequence[Tensor]) -> None:
        """Start sending, and release earlier messages beyond the limit."""
        key = message_key(message)
        specs = [spec_of(tensor) for tensor in tensors]
        codecs = tuple(TensorCodec(Value(f"value {index}", spec)) for index, spec in enumerate(specs))
        header = Route(code, key, message.peer, _HEADER_TAG, (_HEADER,))
        waiting = self._sent.setdefault(message.peer, deque())
        text = _header(specs, self._call, key).to(self._transport.device)
        for route, content in ((header, [text]), (header._replace(tag=_CONTENT_TAG, codecs=codecs), tensors)):
            slot = self._transport.send_slot(route)
            slot.put(content)
            slot.send()
            waiting.append(slot)
        while len(waiting) > 2 * _MAX_IN_FLIGHT:
            waiting.popleft().finish()

    def finish(self) -> None:
        """Wait until all messages have arrived."""
        for waiting in self._sent.values():
            while waiting:
                waiting.popleft().finish()


def _header(specs: Sequence[TensorSpec], call: int, key: MessageKey) -> Tensor:
    rows = [[spec.dtype, spec.shape, spec.requires_grad, spec.order] for spec in specs]
    data = json.dumps([call, key, rows]).encode()
    if len(data) > HEADER_BYTES:
        hint = "stack or concatenate some of them"
        raise RunError("too many values for the header of a message", values=len(specs), stages=key[:2], hint=hint)
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES)), dtype=torch.uint8)


def _read_header(header: Tensor | None, call: int, key: MessageKey) -> list[TensorSpec]:
    assert header is not None
    found_call, found_key, rows = json.loads(header.numpy(force=True).tobytes())
    if (found_call, tuple(found_key)) != (call, key):
        raise RunError(
            "received a message of another call, probably one that failed",
            expected=(call, *key),
            found=(found_call, *found_key),
            hint="restart the processes",
        )
    return [TensorSpec(tuple(shape), dtype, needs, tuple(order)) for dtype, shape, needs, order in rows]
