"""Unix sockets between ranks of one host: they pass the memory of rings, and wake a rank when its peer sends or ends.

The sockets are in the directory of the ranks' status files, which only their user can enter. They are removed as soon
as all ranks are connected.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import time
import weakref
import zlib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import torch

from penstock.launch import GONE, host_id, process_state
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.monitor import RankMonitor
from penstock.runtime.transports.ring import Ring

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
"""how often a waiting rank checks the deadline, and that the process at the other end exists"""
_CONNECT_SECONDS = 30.0
_HELLO = struct.Struct("<qqq")  # purpose, rank, the number in the name of the socket that it connects to
_RING = struct.Struct("<qq")  # number of slots, bytes of each
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_WAKE = b"w"
_CHANNEL_SLOTS = 4
_MESSAGES, _CHANNEL = range(2)
"""purposes of a connection: messages of steps, or a ByteChannel"""
_ConnectionKey = tuple[int, int]
"""purpose of a connection, and the rank at its other end"""
_USABLE, _ON_DEVICE, _NO_MEMORY = range(3)
"""whether a rank can use shared memory, and if not, why"""
_CLOSED = "connection closed by the other rank"


class Link:
    """The connection of this rank to one other rank of the same host."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        weakref.finalize(self, connection.close)
        # A timeout of Python would make another system call before every send and receive.
        connection.setblocking(True)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, round(1e6 * _POLL_SECONDS)))
        size = _CREDENTIALS.size
        self._pid, *_ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        self._hang_up_poll = select.poll()
        self._hang_up_poll.register(connection, select.POLLRDHUP)
        self.is_closed = False

    def wake(self) -> None:
        """Wake the other rank; raises a RuntimeError if it is gone."""
        try:
            self._socket.send(_WAKE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # the buffer is full of wake-ups that the other rank has not read yet
        except OSError as error:
            raise RuntimeError(_CLOSED) from error

    def wait(self) -> bool:
        """Wait until the other rank wakes this one or ends, at most `_POLL_SECONDS`; sets `is_closed`.

        Returns whether it was woken.
        """
        try:
            self.is_closed = not self._socket.recv(len(_WAKE))
            return True
        except BlockingIOError:  # timed out
            # Another process may have inherited the socket of one that was killed.
            self.is_closed = process_state(self._pid) == GONE
        except OSError:
            self.is_closed = True
        return False

    def send_ring(self, ring: Ring, handle: int) -> None:
        """Pass the memory of a new ring to the other rank, and close the handle.

        The other rank must be about to call `receive_ring`, as it is before the first message and after the last
        message of an earlier ring: `wait` would discard the descriptor.
        """
        try:
            content = [_RING.pack(ring.num_slots, ring.slot_bytes)]
            socket.send_fds(self._socket, content, [handle], socket.MSG_DONTWAIT)
        except OSError as error:
            raise RuntimeError(_CLOSED) from error
        finally:
            os.close(handle)

    def receive_ring(self) -> Ring | None:
        """Wait at most `_POLL_SECONDS` for a ring that the other rank passes; None if it passed none."""
        try:
            data, handles, _, _ = socket.recv_fds(self._socket, _RING.size, 1)
        except BlockingIOError:  # timed out
            self.is_closed = process_state(self._pid) == GONE
            return None
        except OSError:
            data, handles = b"", []
        self.is_closed = not data
        if len(data) == _RING.size and not handles:
            # The system drops a descriptor for which there is no room, and the other rank does not send it again.
            raise RuntimeError("the memory of another rank cannot be opened: too many open files")
        return Ring.open(handles[0], *_RING.unpack(data)) if handles else None

    @property
    def is_hung_up(self) -> bool:
        """Whether the other rank has ended or closed the link; reads nothing, so that any thread may call it."""
        return bool(self._hang_up_poll.poll(0))

    def check(self) -> None:
        """Raise a RuntimeError if the link is closed."""
        if self.is_closed:
            raise RuntimeError(_CLOSED)

    def close(self) -> None:
        """Close the link, which wakes the other rank: its waits fail, as do all further messages."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def await_message(ring: Ring, link: Link, monitor: RankMonitor) -> tuple[int, int]:
    """Sleep until the ring has a message, and return its header.

    Raises a RuntimeError at the deadline, or if the other rank has ended.
    """
    start, header = time.monotonic(), ring.request_wake()
    while header is None:
        # Messages that were written before the other rank ended are still read.
        if link.is_closed:
            link.check()
        if not link.wait():
            monitor.check_deadline(start)
        header = ring.header() or ring.request_wake()
    return header


def await_ring(link: Link, monitor: RankMonitor) -> Ring:
    """Wait for a ring from the other rank; raises a RuntimeError like `await_message`."""
    start, ring = time.monotonic(), None
    while ring is None:
        link.check()
        monitor.check_deadline(start)
        ring = link.receive_ring()
    return ring


class ByteChannel:
    """Messages of a few bytes to and from one rank, for synchronisations: each is answered before the next is sent."""

    def __init__(self, link: Link, max_bytes: int) -> None:
        self._link = link
        self._sent, handle = Ring.create(_CHANNEL_SLOTS, max_bytes)
        link.send_ring(self._sent, handle)
        self._received: Ring | None = None

    def send(self, data: bytes) -> None:
        """Send a message; raises a RuntimeError if the other rank is known to be gone."""
        if not self._sent.has_room:
            raise RuntimeError("the other rank does not receive")
        self._sent.write(data)
        if self._sent.publish(0, len(data)):
            self._link.wake()

    def receive(self, monitor: RankMonitor) -> bytes:
        """Wait for the next message; raises a RuntimeError like `await_message`."""
        if self._received is None:
            self._received = await_ring(self._link, monitor)
        ring = self._received
        _, size = ring.header() or await_message(ring, self._link, monitor)
        data = ring.read(size)
        ring.free()
        return data


def connect(
    groups: ProcessGroups, device: torch.device, max_bytes: int
) -> tuple[dict[int, Link], dict[tuple[int, int], str]]:
    """Connect to all ranks of the pipeline that compute on CPUs of this host. Collective.

    Returns the link to each of them, and the pairs of ranks without a link, each with the reason, the same on every
    rank. A link exists at both ends or at none. If all ranks are linked, they get channels for syncs as well, between
    the last rank and each other one. `max_bytes` is the size of the largest message of a channel.
    """
    directory, number, state = groups.monitor.directory, secrets.randbits(62), _USABLE
    listener: socket.socket | None = None
    if device.type != "cpu":
        state = _ON_DEVICE
    else:
        try:
            os.close(Ring.create_smallest()[1])
            listener = _listen(directory, number, groups.num_ranks)
        except (OSError, AttributeError) as error:
            state = _NO_MEMORY
            _LOG.warning("rank %d cannot use shared memory: %s", groups.rank, error)
    try:
        rows = groups.gather(torch.tensor([_host_number(directory), number, state])).tolist()
        host, last = rows[groups.rank][0], groups.num_ranks - 1
        links: dict[int, Link] = {}
        channels: dict[int, ByteChannel] = {}
        if listener is not None:
            numbers = {rank: row[1] for rank, row in enumerate(rows) if row[0] == host and row[2] == _USABLE}
            # Channels have connections of their own: those of messages are closed when a step fails.
            wanted = [(_MESSAGES, rank) for rank in numbers if rank != groups.rank]
            if groups.channels is None:
                wanted += [(_CHANNEL, rank) for _, rank in wanted if last in (rank, groups.rank)]
            for (purpose, rank), link in _connect(directory, groups.rank, numbers, wanted, listener).items():
                if purpose == _MESSAGES:
                    links[rank] = link
                else:
                    channels[rank] = ByteChannel(link, max_bytes)
            # A rank is connected for both purposes or for none.
            links = {rank: link for rank, link in links.items() if (_CHANNEL, rank) not in wanted or rank in channels}
        # A link that failed at one end is used at neither.
        is_linked = groups.gather(torch.tensor([rank in links for rank in range(groups.num_ranks)])).tolist()
    finally:
        if listener is not None:
            listener.close()
            with contextlib.suppress(OSError):
                _path(directory, number).unlink()
    missing = {}
    for rank, other in combinations(range(groups.num_ranks), 2):
        if is_linked[rank][other] and is_linked[other][rank]:
            continue
        states = {rows[end][2]: end for end in (rank, other) if rows[end][2] != _USABLE}
        if _ON_DEVICE in states:
            reason = f"rank {states[_ON_DEVICE]} does not compute on the CPU"
        elif _NO_MEMORY in states:
            reason = f"rank {states[_NO_MEMORY]} cannot use shared memory"
        else:
            reason = "the connection failed" if rows[rank][0] == rows[other][0] else "they are on different hosts"
        missing[rank, other] = reason
        if groups.rank in (rank, other):
            links.pop(rank + other - groups.rank, None)
    if groups.channels is None:
        groups.channels = {} if missing else channels
    return links, missing


def _listen(directory: Path, number: int, num_ranks: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short_path(directory, number) as path:
            listener.bind(path)
        listener.listen(2 * num_ranks)
    except OSError:
        listener.close()
        raise
    return listener


def _connect(
    directory: Path, own_rank: int, numbers: dict[int, int], wanted: list[_ConnectionKey], listener: socket.socket
) -> dict[_ConnectionKey, Link]:
    """Connect to the ranks before this one, and accept the others; links that fail are left out."""
    links = {}
    for purpose, rank in wanted:
        if rank < own_rank:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with _short_path(directory, numbers[rank]) as path:
                    connection.connect(path)  # does not wait until it is accepted
                connection.send(_HELLO.pack(purpose, own_rank, numbers[rank]))
                links[purpose, rank] = Link(connection)
            except OSError as error:
                connection.close()
                _LOG.warning("rank %d could not connect to rank %d: %s", own_rank, rank, error)
    awaited, end = {(purpose, rank) for purpose, rank in wanted if rank > own_rank}, time.monotonic() + _CONNECT_SECONDS
    while awaited:
        try:
            listener.settimeout(max(0.0, end - time.monotonic()))
            connection, _ = listener.accept()
            connection.settimeout(max(0.0, end - time.monotonic()))
            purpose, rank, number = _HELLO.unpack(connection.recv(_HELLO.size))
        except (OSError, struct.error) as error:
            ranks = sorted({rank for _, rank in awaited})
            _LOG.warning("rank %d was not connected to by ranks %s: %s", own_rank, ranks, error)
            break
        if number == numbers[own_rank] and (purpose, rank) in awaited:
            awaited.remove((purpose, rank))
            links[purpose, rank] = Link(connection)
    return links


def _host_number(directory: Path) -> int:
    """A number that is equal on ranks that can connect: those of one host, network namespace and directory."""
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    # A path may have bytes that are no text in the encoding of file names.
    return zlib.crc32(f"{host_id()} {network} ".encode() + os.fsencode(directory.absolute()))


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:x}.socket"


@contextlib.contextmanager
def _short_path(directory: Path, number: int) -> Iterator[str]:
    """A path of the socket through a file descriptor of its directory: the path of a socket has at most 107 bytes."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{_path(directory, number).name}"
    finally:
        os.close(handle)
