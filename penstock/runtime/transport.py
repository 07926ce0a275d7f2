"""Transport: the contract of how messages get from rank to rank, by the ends that they have on this rank."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from penstock.runtime.wire import Wire

Tensors = Sequence[Tensor | None]
Way = tuple[int, int, int]
"""from a stage, to a stage, and the microbatch; gradients go to an earlier stage"""


class Route(NamedTuple):
    """One message of the program: its action code, its way, the rank at the other end, a tag, and what it holds."""

    code: int
    way: Way
    peer: int
    tag: int
    wires: tuple[Wire, ...]


class Departure(ABC):
    """The end of a message that this rank sends, prepared once and used in every step."""

    __slots__ = ("route",)

    def __init__(self, route: Route) -> None:
        self.route = route

    @abstractmethod
    def put(self, tensors: Tensors) -> None:
        """What was made, and is to be sent soon."""

    @abstractmethod
    def send(self) -> None:
        """Start the message, without waiting."""

    @abstractmethod
    def settle(self) -> None:
        """It is known to have arrived: let go of its memory."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until it has arrived, unless it is settled."""

    @property
    @abstractmethod
    def held(self) -> list[Tensor]:
        """What is in memory because of this message."""

    @abstractmethod
    def clear(self) -> None:
        """Let go of it without waiting, after a failure."""


class Arrival(ABC):
    """The end of a message that this rank receives, prepared once and used in every step."""

    __slots__ = ("route",)

    def __init__(self, route: Route) -> None:
        self.route = route

    @abstractmethod
    def post(self) -> None:
        """Make room for the message, without waiting."""

    @property
    @abstractmethod
    def is_here(self) -> bool:
        """Whether a wait would take no time."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until it is here."""

    @abstractmethod
    def take(self) -> Tensors:
        """What came, after it was waited for; it is the caller's from now on."""

    @property
    @abstractmethod
    def held(self) -> list[Tensor]:
        """Memory for what has not been waited for."""

    @abstractmethod
    def clear(self) -> None:
        """Let go of it, after a failure."""


class Transport(ABC):
    """Makes the ends of messages."""

    @abstractmethod
    def departure(self, route: Route) -> Departure:
        """The end that sends."""

    @abstractmethod
    def arrival(self, route: Route) -> Arrival:
        """The end that receives."""

    @abstractmethod
    def open(self) -> None:
        """To be called before the first message of a step."""

    @abstractmethod
    def clear(self) -> None:
        """Forget what an interrupted step has left under way."""
