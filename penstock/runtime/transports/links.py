"""Unix sockets between the ranks of one host: they pass the memory of rings, wake a rank that waits, and show its end.

The ranks of a host meet in the directory of their status files, which only their user can enter. The sockets there are
removed as soon as all ranks are connected.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import torch

from penstock.launch import GONE, host_id, process_state
from penstock.runtime.groups import ProcessGroups
from penstock.runtime.transports.ring import Ring

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
"""how often a waiting rank checks the deadline, and that the process at the other end exists"""
_CONNECT_SECONDS = 30.0
_HELLO = struct.Struct("<qq")  # rank, the number in the name of the socket that it connects to
_RING = struct.Struct("<qq")  # number of slots, bytes of each
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_WAKE = b"w"
_USABLE, _ON_DEVICE, _NO_MEMORY = range(3)
_CLOSED = "connection closed by the other rank"


class Link:
    """The connection of this rank to one other rank of the same host."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setblocking(False)
        size = _CREDENTIALS.size
        self._pid, *_ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._hang_up = select.poll()
        self._hang_up.register(connection, select.POLLRDHUP)
        self.rings: deque[Ring] = deque()
        """the rings that the other rank has created for its messages, and that were not used yet"""
        self.is_closed = False

    def wake(self) -> None:
        """Wake the other rank; raises a RuntimeError if it is gone."""
        try:
            # If the buffer is full, the other rank has messages that wake it.
            with contextlib.suppress(BlockingIOError):
                self._socket.send(_WAKE)
        except OSError as error:
            raise RuntimeError(_CLOSED) from error

    def give(self, ring: Ring, handle: int) -> None:
        """Pass the memory of a new ring to the other rank, and close the handle."""
        try:
            socket.send_fds(self._socket, [_RING.pack(ring.num_slots, ring.slot_bytes)], [handle])
        except OSError as error:
            raise RuntimeError(_CLOSED) from error
        finally:
            os.close(handle)

    def wait(self) -> None:
        """Wait until the other rank has woken this one, passed a ring or ended, but not longer than a poll."""
        if not self._poll.poll(1e3 * _POLL_SECONDS):
            # Another process may have inherited the socket of one that was killed.
            self.is_closed = process_state(self._pid) == GONE
        while not self.is_closed:
            try:
                data, handles, _, _ = socket.recv_fds(self._socket, _RING.size, 1)
            except BlockingIOError:
                return
            except OSError:
                data, handles = b"", []
            if handles:
                self.rings.append(Ring.open(handles[0], *_RING.unpack(data)))
            elif not data:
                self.is_closed = True

    @property
    def is_hung_up(self) -> bool:
        """Whether the other rank has ended or closed the link; for threads that do not read."""
        return bool(self._hang_up.poll(0))

    def check(self) -> None:
        """Raise a RuntimeError if the link is closed."""
        if self.is_closed:
            raise RuntimeError(_CLOSED)

    def close(self) -> None:
        """Close the link, which wakes the other rank: its waits fail, as do all further messages."""
        self.is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def connect(groups: ProcessGroups, device: torch.device) -> tuple[dict[int, Link], dict[tuple[int, int], str]]:
    """Links to all ranks of the pipeline that compute on the CPU of this host, and the pairs of ranks without one.

    Collective. The pairs, each with the reason, are the same on every rank; a link exists at both ends or at none.
    """
    assert groups.monitor is not None
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
        host, links = rows[groups.rank][0], {}
        if listener is not None:
            numbers = {rank: row[1] for rank, row in enumerate(rows) if row[0] == host and row[2] == _USABLE}
            links = _connect(directory, groups.rank, numbers, listener)
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
    return links, missing


def _listen(directory: Path, number: int, num_ranks: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short_path(directory, number) as path:
            listener.bind(path)
        listener.listen(num_ranks)
    except OSError:
        listener.close()
        raise
    return listener


def _connect(directory: Path, own_rank: int, numbers: dict[int, int], listener: socket.socket) -> dict[int, Link]:
    """Connect to the ranks before this one, and accept the others; links that fail are left out."""
    links = {}
    end = time.monotonic() + _CONNECT_SECONDS
    for rank, number in numbers.items():
        if rank < own_rank:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with _short_path(directory, number) as path:
                    connection.connect(path)  # does not wait until it is accepted
                connection.send(_HELLO.pack(own_rank, number))
                links[rank] = Link(connection)
            except OSError as error:
                connection.close()
                _LOG.warning("rank %d could not connect to rank %d: %s", own_rank, rank, error)
    awaited = {rank for rank in numbers if rank > own_rank}
    while awaited:
        try:
            listener.settimeout(max(0.0, end - time.monotonic()))
            connection, _ = listener.accept()
            connection.settimeout(max(0.0, end - time.monotonic()))
            rank, number = _HELLO.unpack(connection.recv(_HELLO.size))
        except (OSError, struct.error) as error:
            _LOG.warning("rank %d was not connected to by ranks %s: %s", own_rank, sorted(awaited), error)
            break
        if number == numbers[own_rank] and rank in awaited:
            awaited.remove(rank)
            links[rank] = Link(connection)
    return links


def _host_number(directory: Path) -> int:
    """Equal on the ranks that can meet in a directory: those of one host, network namespace and launch."""
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return zlib.crc32(f"{host_id()} {network} {directory.absolute()}".encode())


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:x}.socket"


@contextlib.contextmanager
def _short_path(directory: Path, number: int) -> Iterator[str]:
    """A path of the socket through a file descriptor: the name of a socket has at most 107 bytes."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{_path(directory, number).name}"
    finally:
        os.close(handle)
