"""Inside: messages between ranks that are all in one process."""

import torch
from torch import Tensor

from penstock.runtime.transport import Arrival, Departure, Route, Tensors, Transport, Way


class Inside(Transport):
    """A message is in the mailbox of its way from when it is sent until it is taken."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mail: dict[Way, list[Tensor]] = {}

    def departure(self, route: Route) -> Departure:
        """Puts messages into the mailbox."""
        return _Mailed(route, self)

    def arrival(self, route: Route) -> Arrival:
        """Looks into the mailbox."""
        return _Mailbox(route, self)

    def open(self) -> None:
        """A mailbox is always open."""

    def clear(self) -> None:
        """Empty all mailboxes."""
        self.mail.clear()


class _Mailed(Departure):
    __slots__ = ("_inside", "_tensors")

    def __init__(self, route: Route, inside: Inside) -> None:
        super().__init__(route)
        self._inside = inside
        self._tensors: Tensors = ()

    def put(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def send(self) -> None:
        pairs = zip(self.route.wires, self._tensors, strict=True)
        self._inside.mail[self.route.way] = [wire.unpack(wire.pack(t, self._inside.device)) for wire, t in pairs]
        self._tensors = ()

    def settle(self) -> None:
        """What is in a mailbox has arrived."""

    def finish(self) -> None:
        """So there is nothing to wait for."""

    @property
    def held(self) -> list[Tensor]:
        return [tensor for tensor in self._tensors if tensor is not None]

    def clear(self) -> None:
        self._tensors = ()


class _Mailbox(Arrival):
    __slots__ = ("_inside",)

    def __init__(self, route: Route, inside: Inside) -> None:
        super().__init__(route)
        self._inside = inside

    def post(self) -> None:
        """The mailbox needs no room."""

    @property
    def is_here(self) -> bool:
        return self.route.way in self._inside.mail

    def wait(self) -> None:
        """Who finds it empty does not run."""

    def take(self) -> Tensors:
        return self._inside.mail.pop(self.route.way)

    @property
    def held(self) -> list[Tensor]:
        return []

    def clear(self) -> None:
        """All mailboxes are emptied at once."""
