"""Messages between CPU ranks of one host, through rings in shared memory; other messages use torch.distributed.

Each pair of ranks has a ring for each direction. A sender copies its message into the ring and continues; a receiver
that finds no message sleeps until the sender wakes it through a socket (`links.py`).

A send never waits for the receiver. That is safe for every program that `verify` accepts: it proves that all ranks
reach their end even if each send waits until its receive is posted (rendezvous), and a send that waits less can only
let its rank continue earlier. Nor can a message overtake another: a ring keeps their order, and `verify` demands that
both ranks of a pair issue their messages in the same order. A ring that is full does not block either: the messages
that do not fit are kept, as gloo keeps them, and a thread writes them once there is room. So a rank that is blocked
elsewhere, such as in a collective of a sharded stage, cannot stop others by not sending.
"""

import logging
import os
import threading
import time
from collections import deque
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from penstock.errors import RunError
from penstock.launch import num_cores
from penstock.runtime.monitor import RankMonitor
from penstock.runtime.transports.base import (
    RecvSlot,
    Route,
    SendSlot,
    TensorCodec,
    Tensors,
    Transport,
    apply_flags,
    flags_of,
)
from penstock.runtime.transports.links import Link, await_message, await_ring
from penstock.runtime.transports.ring import MOVED, Layout, Ring, copy_piece

_LOG = logging.getLogger(__name__)
_SPINS = 100
"""how often a receiver checks for a message before it sleeps, about 10 us; 0 if there are more ranks than cores"""
_RETRY_SECONDS = (5e-5, 1e-3)
"""the shortest and longest pause of the thread that waits for room in a ring"""
_WAIT_SECONDS = 0.2
"""how often `finish` checks the deadline and the link"""


class SharedMemoryTransport(Transport):
    """Sends the messages to ranks with a link through shared memory, and all others over `remote`."""

    def __init__(self, links: dict[int, Link], remote: Transport, device: torch.device, monitor: RankMonitor) -> None:
        super().__init__(device)
        self._links, self._remote, self.monitor = links, remote, monitor
        self._senders = {rank: _RingSender(link, device) for rank, link in links.items()}
        # Spinning would take the core from a rank that computes. This host has `len(links) + 1` of the ranks.
        spins = _SPINS if num_cores() > len(links) else 0
        self._receivers = {rank: _RingReceiver(link, monitor, spins) for rank, link in links.items()}

    def send_slot(self, route: Route) -> SendSlot:
        sender = self._senders.get(route.peer)
        return self._remote.send_slot(route) if sender is None else _SendSlot(route, sender, self.monitor)

    def recv_slot(self, route: Route) -> RecvSlot:
        receiver = self._receivers.get(route.peer)
        return self._remote.recv_slot(route) if receiver is None else _RecvSlot(route, receiver)

    def clear(self) -> None:
        """Drop messages in transit; other ranks that wait for this one are woken, and raise."""
        super().clear()
        # If the check before the first message failed, no rank has sent anything, and the links stay usable. Otherwise
        # messages of this step would be received in the next one.
        if self.problem is None:
            self._remote.clear()
            for link in self._links.values():
                link.close()


class _Message:
    """A message that is being sent: its tensors as bytes, with their offsets, until it is written."""

    __slots__ = ("layout", "parts", "position", "tag")

    def __init__(self, tag: int, layout: Layout, tensors: Tensors, device: torch.device) -> None:
        self.tag, self.layout, self.position = tag, layout, 0
        pairs = zip(layout.codecs, layout.offsets, tensors, strict=True)
        self.parts = [
            (offset, codec.pack(tensor, device).reshape(-1).view(torch.uint8))
            for codec, offset, tensor in pairs
            if not codec.is_empty
        ]
        if layout.has_flags:
            self.parts.append((0, flags_of(tensors)))


class _RingSender:
    """The messages to one rank."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self._link, self._device = link, device
        self._ring: Ring | None = None
        self.pending: deque[_Message] = deque()
        """messages that found no room; `_thread` writes them"""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: RuntimeError | None = None
        """raised in `_thread`; `finish` raises it again"""
        self._layouts: WeakValueDictionary[tuple[TensorCodec, ...], Layout] = WeakValueDictionary()
        self._must_check_size = True
        """whether the ring may be too small, because steps were compiled since it was created"""

    def layout(self, route: Route) -> Layout:
        """The layout of the messages of a route; the ring is made to fit them before the next one is sent."""
        layout = _layout(self._layouts, route)
        layout.num_messages += 1
        self._must_check_size = True
        return layout

    def send(self, tag: int, layout: Layout, tensors: Tensors) -> _Message | None:
        """Write a message into the ring; one that does not fit is returned, and written later."""
        # `pending` is read without the lock: only this thread appends to it, and once it is empty, `_thread` does not
        # use the ring.
        if self._must_check_size and not self.pending:
            self._grow()
        ring = self._ring
        if self.pending or layout.num_bytes > ring.slot_bytes or not ring.has_room:
            return self._send_later(_Message(tag, layout, tensors, self._device))
        flags, buffers = ring.slot_tensors(layout)
        for codec, buffer, tensor in zip(layout.codecs, buffers, tensors, strict=True):
            buffer.copy_(codec.prepare(tensor, self._device))
        if flags is not None:
            flags.copy_(flags_of(tensors))
        if ring.publish(tag, layout.num_bytes):
            self._link.wake()
        return None

    def _send_later(self, message: _Message) -> _Message | None:
        """Write as much of a message as there is room for; a thread writes the rest."""
        with self._changed:
            if not self.pending and self._write(message):
                return None
            self.pending.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_pending, name="penstock-send", daemon=True)
                self._thread.start()
            return message

    def _write(self, message: _Message) -> bool:
        """Write pieces of a message until it is complete, or the ring is full."""
        ring, size = self._ring, message.layout.num_bytes
        while ring.has_room:
            piece = ring.content(min(ring.slot_bytes, size - message.position))
            copy_piece(message.parts, message.position, piece, is_sent=True)
            message.position += len(piece)
            if ring.publish(message.tag, size):
                self._link.wake()
            if message.position >= size:
                return True
        return False

    def _write_pending(self) -> None:
        """Write the pending messages as room becomes free, until there are none; the target of `_thread`."""
        pause, longest = _RETRY_SECONDS
        while True:
            with self._changed:
                before = self.pending[0].position if self.pending else 0
                try:
                    while self.pending and self._write(self.pending[0]):
                        self.pending.popleft()
                        pause = _RETRY_SECONDS[0]
                    # The receiver does not wake this thread when it has ended.
                    if self.pending and self._link.is_hung_up:
                        self._link.is_closed = True
                        self._link.check()
                except RuntimeError as error:
                    self._error = error
                if not self.pending or self._error is not None or self._link.is_closed:
                    self._thread = None
                    self._changed.notify_all()
                    return
                pause = _RETRY_SECONDS[0] if self.pending[0].position > before else min(2 * pause, longest)
            time.sleep(pause)

    def finish(self, message: _Message, monitor: RankMonitor) -> None:
        """Wait until a message is written, at most until the deadline."""
        start = time.monotonic()
        with self._changed:
            while message in self.pending:
                if self._error is not None:
                    raise self._error
                self._link.check()
                monitor.check_deadline(start)
                self._changed.wait(_WAIT_SECONDS)

    def clear(self) -> None:
        """Drop the messages that were not written. Closes the link if there are any: the receiver waits for them."""
        with self._changed:
            if self.pending:
                self._link.close()
            self.pending.clear()

    def _grow(self) -> None:
        """Replace the ring by a larger one if it is too small for the messages of the steps that were compiled."""
        self._must_check_size = False
        ring, layouts = self._ring, list(self._layouts.values())
        size, count = max(each.num_bytes for each in layouts), sum(each.num_messages for each in layouts)
        if ring is not None and (ring.fits(count, size) or not ring.has_room):
            # Without room, the move cannot be published now: the next message tries again.
            self._must_check_size = not ring.fits(count, size)
            return
        try:
            new, handle = Ring.create(count, size)
        except OSError as error:
            _LOG.warning("no shared memory for messages of %d bytes (%s): they are sent in pieces", size, error)
            if ring is not None:
                return
            new, handle = _smallest_ring()
        # In this order: a receiver expects a new ring only once it has read in the old one that the sender has moved.
        if ring is not None and ring.publish(MOVED, 0):
            self._link.wake()
        self._link.send_ring(new, handle)
        self._ring = new


def _smallest_ring() -> tuple[Ring, int]:
    """A ring of the smallest size, and its file descriptor; raises RunError if memory is lacking even for that."""
    try:
        return Ring.create_smallest()
    except OSError as error:
        raise RunError(
            "there is no shared memory for messages between ranks",
            reason=os.strerror(error.errno or 0),
            hint='RunOptions(transport="distributed")',
        ) from error


class _RingReceiver:
    """The messages from one rank."""

    def __init__(self, link: Link, monitor: RankMonitor, spins: int) -> None:
        self._link, self.monitor, self._spins = link, monitor, spins
        self._ring: Ring | None = None
        self.posted: deque[_RecvSlot] = deque()
        """receives in the order in which the other rank sends"""
        self.layouts: WeakValueDictionary[tuple[TensorCodec, ...], Layout] = WeakValueDictionary()
        """those of the messages from this rank, shared by the slots of all compiled steps"""

    def receive(self) -> None:
        """Wait for the next message and give it to the receive that was posted first."""
        slot = self.posted.popleft()
        layout = slot.layout
        ring, tag, size = self._next(slot.route)
        if tag != slot.route.tag or size != layout.num_bytes:
            raise RunError(
                "received another message than the program expects",
                expected=(slot.route.tag, layout.num_bytes),
                found=(tag, size),
                peer=slot.route.peer,
            )
        if size <= ring.slot_bytes:
            flags, buffers = ring.slot_tensors(layout)
            has_value = None if flags is None else flags.tolist()
            received: list[Tensor | None] = []
            for codec, buffer in zip(layout.codecs, buffers, strict=True):
                # Copied: autograd may keep the tensor until backward, and the slot is needed before that. Slots that
                # are used in place would be freed in the order of the backwards, not in that of the messages, so the
                # ring would become an allocator. The copy is not worth that: with the GPT of `penstock demo` it takes
                # 9 us for a message of 256 KiB, and the pass that makes the message 20 ms. At 4 MiB it takes 140 us.
                received.append(codec.unpack(buffer.clone()))
            ring.free()
        else:
            has_value, received = self._receive_pieces(slot.route, layout)
        if has_value is not None:
            received = apply_flags(layout.codecs, received, has_value)
        slot.received = received

    def _receive_pieces(self, route: Route, layout: Layout) -> tuple[list[int] | None, list[Tensor | None]]:
        """Receive a message that is larger than a slot; returns its flags, if it has any, and its tensors."""
        buffers = [codec.buffer(torch.device("cpu")) for codec in layout.codecs]
        pairs = zip(layout.offsets, buffers, strict=True)
        parts = [(offset, buffer.view(-1).view(torch.uint8)) for offset, buffer in pairs if buffer.numel()]
        flags = torch.empty(len(buffers), dtype=torch.uint8) if layout.has_flags else None
        if flags is not None:
            parts.append((0, flags))
        position = 0
        while position < layout.num_bytes:
            ring, _, _ = self._next(route)
            piece = ring.content(min(ring.slot_bytes, layout.num_bytes - position))
            copy_piece(parts, position, piece, is_sent=False)
            position += len(piece)
            ring.free()
        received = [codec.unpack(buffer) for codec, buffer in zip(layout.codecs, buffers, strict=True)]
        return None if flags is None else flags.tolist(), received

    def _next(self, route: Route) -> tuple[Ring, int, int]:
        """The ring with the next message in its current slot, and the tag and size of the message."""
        while True:
            ring = self._ring
            if ring is not None:
                tag, size = ring.header() or self._wait(route, ring)
                if tag != MOVED:
                    return ring, tag, size
            self.monitor.waiting(route.code, route.peer)
            self._ring = await_ring(self._link, self.monitor)

    def _wait(self, route: Route, ring: Ring) -> tuple[int, int]:
        """Wait until the ring has a message, and return its header."""
        for _ in range(self._spins):
            if header := ring.header():
                return header
        self.monitor.waiting(route.code, route.peer)
        return await_message(ring, self._link, self.monitor)


class _SendSlot(SendSlot):
    is_held = False
    __slots__ = ("_layout", "_message", "_monitor", "_sender", "_tag")

    def __init__(self, route: Route, sender: _RingSender, monitor: RankMonitor) -> None:
        super().__init__(route)
        self._sender, self._monitor, self._layout, self._tag = sender, monitor, sender.layout(route), route.tag
        self._message: _Message | None = None
        """the message if it does not fit into the ring"""

    def send(self) -> None:
        tensors, self._tensors = self._tensors, ()
        try:
            self._message = self._sender.send(self._tag, self._layout, tensors)
        except RuntimeError as error:
            raise self._monitor.message_error(self.route.code, self.route.peer, error) from error

    def release(self) -> None:
        """No-op: `send` has copied the message, or a thread does."""

    def finish(self) -> None:
        message, self._message = self._message, None
        if message is not None:
            self._monitor.waiting(self.route.code, self.route.peer)
            try:
                self._sender.finish(message, self._monitor)
            except RuntimeError as error:
                raise self._monitor.message_error(self.route.code, self.route.peer, error) from error

    def clear(self) -> None:
        super().clear()
        self._message = None
        self._sender.clear()


class _RecvSlot(RecvSlot):
    __slots__ = ("_receiver", "layout")

    def __init__(self, route: Route, receiver: _RingReceiver) -> None:
        super().__init__(route)
        self._receiver, self.layout = receiver, _layout(receiver.layouts, route)

    def post(self) -> None:
        self._receiver.posted.append(self)

    def wait(self) -> None:
        while self.received is None:
            try:
                self._receiver.receive()
            except RuntimeError as error:
                raise self._receiver.monitor.message_error(self.route.code, self.route.peer, error) from error

    def clear(self) -> None:
        super().clear()
        self._receiver.posted.clear()


def _layout(layouts: WeakValueDictionary[tuple[TensorCodec, ...], Layout], route: Route) -> Layout:
    """The layout of a route, which lives as long as the slots of the compiled steps that use it."""
    # By the codecs themselves: a compiled step uses the same ones for all microbatches of one kind.
    layout = layouts.get(route.codecs)
    if layout is None:
        layout = layouts[route.codecs] = Layout(route.codecs, route.has_flags)
    return layout
