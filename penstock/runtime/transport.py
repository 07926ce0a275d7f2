"""Transport: how messages get from rank to rank; between processes over torch.distributed, or inside one."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.wire import Wire


class Route:
    """One message of the program, prepared: its action code, the rank at the other end, a tag, and what it holds."""

    __slots__ = ("code", "key", "peer", "tag", "wires")

    def __init__(self, code: int, key: tuple[int, int, int], peer: int, tag: int, wires: Sequence[Wire]) -> None:
        self.code, self.key, self.peer, self.tag = code, key, peer, tag
        self.wires = tuple(wires)


class Arrival(Protocol):
    """A message that is or will be here."""

    @property
    def is_here(self) -> bool: ...

    def wait(self) -> Sequence[Tensor | None]: ...


class Departure(Protocol):
    """A message under way; its memory is held until it was waited for."""

    def wait(self) -> None: ...


class Handed:
    """What a stage of the same rank handed on."""

    __slots__ = ("_tensors",)
    is_here = True

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = tensors

    def wait(self) -> Sequence[Tensor | None]:
        """At once."""
        return self._tensors


class Observer(Protocol):
    """Who is told when a rank waits, says how long it may, and turns a broken wait into an error with words."""

    deadline: timedelta

    def waits(self, code: int, peer: int) -> None: ...

    def lost(self, code: int, peer: int, error: RuntimeError) -> Exception: ...


class Transport(ABC):
    """Sends never block; a receive posts its buffers and is waited for by who needs it."""

    @abstractmethod
    def send(self, route: Route, tensors: Sequence[Tensor | None]) -> Departure:
        """Start a message."""

    @abstractmethod
    def receive(self, route: Route) -> Arrival:
        """Post a receive."""

    def clear(self) -> None:  # noqa: B027
        """Forget what an interrupted step has left behind."""


class Inside(Transport):
    """All ranks in one process: a message is in the mailbox of its key from send to receive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mail: dict[tuple[int, int, int], list[Tensor]] = {}

    def send(self, route: Route, tensors: Sequence[Tensor | None]) -> Departure:
        """Put the message into the mailbox."""
        packed = [wire.pack(tensor, self._device) for wire, tensor in zip(route.wires, tensors, strict=True)]
        self._mail[route.key] = [wire.unpack(tensor) for wire, tensor in zip(route.wires, packed, strict=True)]
        return _GONE

    def receive(self, route: Route) -> Arrival:
        """A look into the mailbox."""
        return _Mail(self._mail, route.key)

    def clear(self) -> None:
        """Empty all mailboxes."""
        self._mail.clear()


class _Gone:
    def wait(self) -> None:
        """What is in a mailbox has arrived."""


_GONE = _Gone()


class _Mail:
    __slots__ = ("_key", "_mail")

    def __init__(self, mail: dict[tuple[int, int, int], list[Tensor]], key: tuple[int, int, int]) -> None:
        self._mail, self._key = mail, key

    @property
    def is_here(self) -> bool:
        return self._key in self._mail

    def wait(self) -> Sequence[Tensor | None]:
        return self._mail.pop(self._key)


class Between(Transport):
    """Ranks are processes: tensors go one by one over isend and irecv of the group, in the order of the program."""

    def __init__(self, group: Any, device: torch.device, observer: Observer) -> None:
        self._group, self._device, self._observer = group, device, observer

    def send(self, route: Route, tensors: Sequence[Tensor | None]) -> Departure:
        """Start one isend per tensor."""
        departure = _Leaving(self, route)
        for wire, tensor in zip(route.wires, tensors, strict=True):
            if not wire.is_empty:
                packed = wire.pack(tensor, self._device)
                work = dist.isend(packed, group=self._group, group_dst=route.peer, tag=route.tag)
                departure.under_way.append((work, packed))
        return departure

    def receive(self, route: Route) -> Arrival:
        """Post one irecv per tensor."""
        return _Awaited(self, route)

    def post(self, route: Route) -> list[tuple[Any, Tensor]]:
        """Buffers with their works, None for what is too empty to be sent."""
        posted = []
        for wire in route.wires:
            buffer = wire.buffer(self._device)
            work = None
            if not wire.is_empty:
                work = dist.irecv(buffer, group=self._group, group_src=route.peer, tag=route.tag)
            posted.append((work, buffer))
        return posted

    def wait(self, work: Any, route: Route) -> None:
        """Wait for one isend or irecv, not longer than the deadline."""
        self._observer.waits(route.code, route.peer)
        try:
            work.wait(self._observer.deadline)
        except RuntimeError as error:
            raise self._observer.lost(route.code, route.peer, error) from error


class _Leaving:
    __slots__ = ("_route", "_transport", "under_way")

    def __init__(self, transport: Between, route: Route) -> None:
        self._transport, self._route = transport, route
        self.under_way: list[tuple[Any, Tensor]] = []

    def wait(self) -> None:
        for work, _ in self.under_way:
            self._transport.wait(work, self._route)
        self.under_way.clear()


class _Awaited:
    __slots__ = ("_posted", "_route", "_transport")

    def __init__(self, transport: Between, route: Route) -> None:
        self._transport, self._route = transport, route
        self._posted = transport.post(route)

    @property
    def is_here(self) -> bool:
        return all(work is None or work.is_completed() for work, _ in self._posted)

    def wait(self) -> Sequence[Tensor | None]:
        for work, _ in self._posted:
            if work is not None:
                self._transport.wait(work, self._route)
        pairs = zip(self._route.wires, self._posted, strict=True)
        return [wire.unpack(buffer) for wire, (_, buffer) in pairs]
