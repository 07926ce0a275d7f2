"""Between: messages between processes, over the sends and receives of a group of torch.distributed."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.runtime.transport import Arrival, Departure, Route, Tensors, Transport


class Observer(Protocol):
    """Who is told when a rank waits, says how long it may, and turns a broken wait into an error with words."""

    deadline: timedelta

    def waits(self, code: int, peer: int) -> None: ...

    def lost(self, code: int, peer: int, error: RuntimeError) -> Exception: ...


class Between(Transport):
    """The tensors of a message go one by one, in the order of the program."""

    def __init__(self, group: Any, device: torch.device, observer: Observer) -> None:
        self.group, self.device, self.observer = group, device, observer

    def departure(self, route: Route) -> Departure:
        """Sends over the group."""
        return _Sent(route, self)

    def arrival(self, route: Route) -> Arrival:
        """Receives over the group."""
        return _Received(route, self)

    def open(self) -> None:
        """A group takes messages at any time."""

    def clear(self) -> None:
        """What is under way in a group cannot be called back."""

    def wait(self, works: Sequence[Any], route: Route) -> None:
        """Wait for all sends or receives of one message, not longer than the deadline."""
        try:
            for work in works:
                work.wait(self.observer.deadline)
        except RuntimeError as error:
            raise self.observer.lost(route.code, route.peer, error) from error


class _Sent(Departure):
    __slots__ = ("_between", "_packed", "_tensors", "_works")

    def __init__(self, route: Route, between: Between) -> None:
        super().__init__(route)
        self._between = between
        self._tensors: Tensors = ()
        self._works: list[Any] = []
        self._packed: list[Tensor] = []

    def put(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def send(self) -> None:
        tensors, self._tensors = self._tensors, ()
        between, (_, _, peer, tag, wires) = self._between, self.route
        for wire, tensor in zip(wires, tensors, strict=True):
            if not wire.is_empty:
                packed = wire.pack(tensor, between.device)
                self._packed.append(packed)
                self._works.append(between.group.send([packed], peer, tag))

    def settle(self) -> None:
        self._between.wait(self._works, self.route)
        self._works, self._packed = [], []

    def finish(self) -> None:
        if self._works:
            self._between.observer.waits(self.route.code, self.route.peer)
            self.settle()

    @property
    def held(self) -> list[Tensor]:
        return [*self._packed, *(tensor for tensor in self._tensors if tensor is not None)]

    def clear(self) -> None:
        self._tensors, self._works, self._packed = (), [], []


class _Received(Arrival):
    __slots__ = ("_between", "_buffers", "_came", "_works")

    def __init__(self, route: Route, between: Between) -> None:
        super().__init__(route)
        self._between = between
        self._works: list[Any] = []
        self._buffers: list[Tensor] = []
        self._came: list[Tensor] = []

    def post(self) -> None:
        between, (_, _, peer, tag, wires) = self._between, self.route
        for wire in wires:
            buffer = wire.buffer(between.device)
            self._buffers.append(buffer)
            if not wire.is_empty:
                self._works.append(between.group.recv([buffer], peer, tag))

    @property
    def is_here(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        self._between.observer.waits(self.route.code, self.route.peer)
        self._between.wait(self._works, self.route)
        self._came = [wire.unpack(buffer) for wire, buffer in zip(self.route.wires, self._buffers, strict=True)]
        self._works, self._buffers = [], []

    def take(self) -> Tensors:
        came, self._came = self._came, []
        return came

    @property
    def held(self) -> list[Tensor]:
        return self._buffers

    def clear(self) -> None:
        self._works, self._buffers, self._came = [], [], []
