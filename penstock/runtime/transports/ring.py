"""A ring of slots in shared memory: one process writes messages into it, another reads them in the same order.

The memory is an anonymous file (`memfd_create`), which the sender creates and passes to the receiver through a Unix
socket: no other process can open it, and the system frees it when both ends are gone, however they ended. It is not
part of /dev/shm, so the size of that mount does not limit it.

Layout: three counters, each in a cache line of its own, then the slots. A slot is a header, the tag and the size of its
message, and the content. A message that is larger than a slot takes several.
"""

import mmap
import os
import platform
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.runtime.transports.base import TensorCodec

MAX_SLOT_BYTES = 4 << 20
MAX_RING_BYTES = 16 << 20
"""limits of the content of one slot, and of all slots of a ring"""
MAX_SLOTS = 64
_MIN_SLOTS = 2
_MIN_SLOT_BYTES = 4096
_ALIGNMENT = 64
_HEADER_BYTES = _ALIGNMENT
# Positions of the counters in units of 8 bytes.
_WRITTEN, _FREED, _IS_AWAITED = 0, 8, 16
_FIRST_SLOT = 4096
MOVED = -1
"""tag of the last message in a ring: the next one is in a new ring"""


def round_up(size: int) -> int:
    """The next multiple of the alignment, at which tensors of every dtype may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class SlotTensors(NamedTuple):
    """The content of one slot as the tensors of a message that fits into it."""

    flags: Tensor | None
    tensors: list[Tensor]


class Layout:
    """Where the tensors of a message are in its content, the same at both ends."""

    def __init__(self, codecs: Sequence[TensorCodec], has_flags: bool) -> None:
        self.codecs, self.has_flags = tuple(codecs), has_flags
        self.num_messages = 0
        """number of messages of the compiled steps that have this layout"""
        self.slot_tensors: dict[int, SlotTensors] = {}
        """the slots of `ring` as tensors, by index; they are kept, since a step uses the same few again"""
        self.ring: Ring | None = None
        start = round_up(len(self.codecs)) if has_flags else 0
        self.offsets: list[int] = []
        for codec in self.codecs:
            self.offsets.append(start)
            start = round_up(start + codec.num_bytes)
        self.num_bytes = start


_BARRIER = threading.Lock()
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")
"""whether the processor keeps the order of writes, and of reads before writes, as x86-64 does"""


def memory_barrier() -> None:
    """Make all writes so far visible to other processes before any later read or write of this thread.

    Python has no barrier, but locks. On x86-64 the atomic instruction in a lock is a full barrier.
    """
    with _BARRIER:
        pass
    if not _KEEPS_ORDER:
        # Elsewhere earlier writes may be delayed until the first release, and later reads may run ahead to the last
        # acquire. With a second acquire after the first release they cannot pass each other.
        with _BARRIER:
            pass


class Ring:
    """One end of a ring with `num_slots` slots of `slot_bytes` bytes of content each."""

    def __init__(self, memory: mmap.mmap, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.counters = memoryview(memory).cast("q")
        """all of the memory as 64-bit numbers: the counters, and the headers of the slots

        On 64-bit processors a memoryview reads or writes an aligned number with one instruction, so that the other end
        never sees half of a counter. Each counter has one writer, except _IS_AWAITED: both ends may clear it, and a
        lost update costs one needless wake or one more check.
        """
        self._position, self._start = 0, _FIRST_SLOT
        """number of slots that this end has written or freed, and the offset of the current one"""
        self._limit = num_slots
        """the `_position` up to which the sender may write, when it last read the counter of freed slots"""

    @staticmethod
    def create(num_messages: int, message_bytes: int) -> tuple["Ring", int]:
        """A new ring for a step with these messages, and its file descriptor; raises OSError if memory is lacking."""
        num_slots, slot_bytes = _shape(num_messages, message_bytes)
        handle = os.memfd_create("penstock", os.MFD_CLOEXEC)
        try:
            size = _size(num_slots, slot_bytes)
            # Reserved now: without memory, a later write to the page would kill the process.
            os.posix_fallocate(handle, 0, size)
            return Ring(mmap.mmap(handle, size), num_slots, slot_bytes), handle
        except BaseException:
            os.close(handle)
            raise

    @staticmethod
    def create_smallest() -> tuple["Ring", int]:
        """A ring through which messages of any size pass in small pieces."""
        return Ring.create(_MIN_SLOTS, _MIN_SLOT_BYTES)

    @staticmethod
    def open(handle: int, num_slots: int, slot_bytes: int) -> "Ring":
        """The receiver's end of a ring; closes its file descriptor."""
        try:
            return Ring(mmap.mmap(handle, _size(num_slots, slot_bytes)), num_slots, slot_bytes)
        finally:
            os.close(handle)

    def fits(self, num_messages: int, message_bytes: int) -> bool:
        """Whether `create` would give a ring that is no larger."""
        num_slots, slot_bytes = _shape(num_messages, message_bytes)
        return self.slot_bytes >= slot_bytes and self.num_slots >= min(num_slots, MAX_RING_BYTES // self.slot_bytes)

    # ------------------------------------------------------------------------------------------------------- sender

    @property
    def has_room(self) -> bool:
        """Whether a slot is free for writing."""
        if self._position < self._limit:
            return True
        self._limit = self.counters[_FREED] + self.num_slots
        return self._position < self._limit

    def publish(self, tag: int, num_bytes: int) -> bool:
        """Hand the slot that was filled over to the receiver; returns whether the receiver must be woken."""
        counters, header = self.counters, self._start // 8
        counters[header], counters[header + 1] = tag, num_bytes
        self._position = position = self._position + 1
        self._start = _FIRST_SLOT + (position % self.num_slots) * (_HEADER_BYTES + self.slot_bytes)
        if not _KEEPS_ORDER:
            memory_barrier()  # the content is visible before the counter
        counters[_WRITTEN] = position
        memory_barrier()  # either this sees that the receiver waits, or the receiver sees the new counter
        if not counters[_IS_AWAITED]:
            return False
        counters[_IS_AWAITED] = 0
        return True

    # ----------------------------------------------------------------------------------------------------- receiver

    def header(self) -> tuple[int, int] | None:
        """The tag of the message in the current slot and the bytes of all its pieces; None if it was not sent yet."""
        counters = self.counters
        if counters[_WRITTEN] == self._position:
            return None
        if not _KEEPS_ORDER:
            memory_barrier()  # the counter was read before the content
        header = self._start // 8
        return counters[header], counters[header + 1]

    def request_wake(self) -> tuple[int, int] | None:
        """Ask the sender to wake this process after its next message; returns the header if it is here already."""
        self.counters[_IS_AWAITED] = 1
        memory_barrier()
        header = self.header()
        if header is not None:
            self.counters[_IS_AWAITED] = 0
        return header

    def free(self) -> None:
        """Let the sender overwrite the current slot."""
        self._position = position = self._position + 1
        self._start = _FIRST_SLOT + (position % self.num_slots) * (_HEADER_BYTES + self.slot_bytes)
        if not _KEEPS_ORDER:
            memory_barrier()  # the content was read before the sender can overwrite it
        self.counters[_FREED] = position

    # --------------------------------------------------------------------------------------------------------- both

    def slot_tensors(self, layout: Layout) -> SlotTensors:
        """The current slot as the tensors of a message."""
        if layout.ring is not self:
            layout.ring, layout.slot_tensors = self, {}
        index = self._position % self.num_slots
        tensors = layout.slot_tensors.get(index)
        if tensors is None:
            content = self.content(self.slot_bytes)
            flags = content[: len(layout.codecs)] if layout.has_flags else None
            pairs = zip(layout.codecs, layout.offsets, strict=True)
            tensors = layout.slot_tensors[index] = SlotTensors(
                flags, [codec.view(content[start:]) for codec, start in pairs]
            )
        return tensors

    def write(self, data: bytes) -> None:
        """Write bytes into the current slot."""
        start = self._start + _HEADER_BYTES
        self._memory[start : start + len(data)] = data

    def read(self, num_bytes: int) -> bytes:
        """The first bytes of the current slot."""
        start = self._start + _HEADER_BYTES
        return self._memory[start : start + num_bytes]

    def content(self, num_bytes: int) -> Tensor:
        """The first bytes of the current slot as a tensor."""
        start = self._start + _HEADER_BYTES
        return self._bytes[start : start + num_bytes]


def _shape(num_messages: int, message_bytes: int) -> tuple[int, int]:
    """Slots, and bytes of each, for a step with messages of this size.

    Powers of two: steps of ever more or larger messages then need few rings, of which the last is as large as all
    before it.
    """
    slot_bytes = min(1 << (max(message_bytes, _ALIGNMENT) - 1).bit_length(), MAX_SLOT_BYTES)
    num_slots = min(1 << max(num_messages - 1, 0).bit_length(), MAX_SLOTS, MAX_RING_BYTES // slot_bytes)
    return max(num_slots, _MIN_SLOTS), slot_bytes


def _size(num_slots: int, slot_bytes: int) -> int:
    return _FIRST_SLOT + num_slots * (_HEADER_BYTES + slot_bytes)


def copy_piece(parts: Sequence[tuple[int, Tensor]], start: int, piece: Tensor, is_sent: bool) -> None:
    """Copy the bytes of a message from `start` between its tensors and a piece of it, such as a slot.

    `parts` are the tensors of the message, as bytes, with their offsets.
    """
    end = start + len(piece)
    for offset, part in parts:
        first, last = max(offset, start), min(offset + len(part), end)
        if first < last:
            inside, outside = piece[first - start : last - start], part[first - offset : last - offset]
            if is_sent:
                inside.copy_(outside)
            else:
                outside.copy_(inside)
