"""Calls: one prepared call per instruction; a compiled program is a flat list of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from penstock.runtime.transport import Arrival, Departure, Handed, Route, Transport

Gradients = dict[str, Tensor | None]


class Passage(Protocol):
    """One forward of a stage on one microbatch, kept until its backward."""

    def take_left(self) -> Mapping[str, Any]: ...

    def backward(self, gradients: Mapping[str, Tensor | None]) -> Gradients: ...

    def input_grad(self, gradients: Mapping[str, Tensor | None]) -> Gradients: ...

    def weight_grad(self) -> None: ...


class Player(Protocol):
    """Who runs the stages of a rank; what a step trains on is its own affair."""

    def forward(self, stage: int, microbatch: int, incoming: dict[str, Any], is_split: bool) -> Passage: ...

    def can_split(self, stage: int) -> bool: ...

    def own_gradients(self, stage: int, microbatch: int) -> Gradients: ...

    def reduce(self, stage: int) -> None: ...

    def unshard(self, stage: int) -> None: ...

    def reshard(self, stage: int) -> None: ...


class Cell:
    """What one (stage, microbatch) holds while a step runs; empty between steps."""

    __slots__ = ("arrivals", "gradients", "incoming", "outbox", "passage")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Let go of everything."""
        self.incoming: dict[str, Any] = {}
        self.arrivals: list[tuple[Route, Arrival]] = []
        self.gradients: dict[int, Arrival] = {}
        self.outbox: dict[int, Sequence[Tensor | None]] = {}
        self.passage: Any = None


class Call(ABC):
    """One instruction, ready to run."""

    __slots__ = ()

    @abstractmethod
    def __call__(self) -> None:
        """Run it."""

    @property
    def is_ready(self) -> bool:
        """Whether it would run without waiting for a message."""
        return True

    def wait(self) -> None:  # noqa: B027
        """Wait for the messages that it needs; to be called before it runs."""


class Hand:
    """Values that go from one cell to another stage, on this rank or to be sent later."""

    __slots__ = ("cell", "names", "stage")

    def __init__(self, stage: int, names: Sequence[str], cell: Cell | None) -> None:
        self.stage, self.names, self.cell = stage, tuple(names), cell


class ForwardCall(Call):
    """Run the stage on what came, and hand on what leaves."""

    __slots__ = ("_cell", "_consumers", "_is_split", "_microbatch", "_player", "_stage")

    def __init__(
        self, player: Player, place: tuple[int, int], cell: Cell, consumers: Sequence[Hand], is_split: bool
    ) -> None:
        self._player, self._cell, self._consumers, self._is_split = player, cell, tuple(consumers), is_split
        self._stage, self._microbatch = place

    @property
    def is_ready(self) -> bool:
        """Whether all incoming messages are here."""
        return all(arrival.is_here for _, arrival in self._cell.arrivals)

    def wait(self) -> None:
        """Take in what came."""
        cell = self._cell
        for route, arrival in cell.arrivals:
            for wire, tensor in zip(route.wires, arrival.wait(), strict=True):
                cell.incoming[wire.value.name] = tensor.requires_grad_() if wire.requires_grad else tensor  # type: ignore[union-attr]
        cell.arrivals.clear()

    def __call__(self) -> None:
        """Run the stage."""
        cell = self._cell
        incoming, cell.incoming = cell.incoming, {}
        cell.passage = self._player.forward(self._stage, self._microbatch, incoming, self._is_split)
        left = cell.passage.take_left()
        for hand in self._consumers:
            if hand.cell is None:
                cell.outbox[hand.stage] = [left[name] for name in hand.names]
            else:
                for name in hand.names:
                    hand.cell.incoming[name] = left[name]


class BackwardCall(Call):
    """Sum up the gradients that came, run the stage's backward, hand back what returns.

    Gradients of one value are summed from its last reader to its first, as autograd does in the unsplit model.
    """

    __slots__ = ("_cell", "_consumers", "_is_split", "_microbatch", "_player", "_producers", "_stage")

    def __init__(
        self,
        player: Player,
        place: tuple[int, int],
        cell: Cell,
        hands: tuple[Sequence[Hand], Sequence[Hand]],
        is_split: bool,
    ) -> None:
        self._player, self._cell, self._is_split = player, cell, is_split
        self._stage, self._microbatch = place
        self._producers = tuple(hands[0])
        self._consumers = tuple(sorted(hands[1], key=lambda hand: -hand.stage))

    @property
    def is_ready(self) -> bool:
        """Whether all gradients are here."""
        return all(arrival.is_here for arrival in self._cell.gradients.values())

    def wait(self) -> None:
        """Take in the gradients that came."""
        gradients = self._cell.gradients
        for stage, arrival in gradients.items():
            gradients[stage] = Handed(arrival.wait())

    def __call__(self) -> None:
        """Run the backward, whole or only for the inputs."""
        cell, total = self._cell, self._player.own_gradients(self._stage, self._microbatch)
        for hand in self._consumers:
            for name, gradient in zip(hand.names, cell.gradients.pop(hand.stage).wait(), strict=True):
                if gradient is not None:
                    kept = total.get(name)
                    total[name] = gradient if kept is None else kept + gradient
        passage = cell.passage
        if self._is_split:
            returned = passage.input_grad(total)
        else:
            returned = passage.backward(total)
            cell.passage = None
        for hand in self._producers:
            gradients = [returned.get(name) for name in hand.names]
            if hand.cell is None:
                cell.outbox[hand.stage] = gradients
            else:
                hand.cell.gradients[self._stage] = Handed(gradients)


class WeightGradCall(Call):
    """The rest of a split backward; nothing where input and weight gradients ran as one."""

    __slots__ = ("_cell",)

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def __call__(self) -> None:
        """Accumulate the gradients of the parameters."""
        if self._cell.passage is not None:
            self._cell.passage.weight_grad()
            self._cell.passage = None


class OverlapCall(Call):
    """A forward and a backward that belong together."""

    __slots__ = ("_parts",)

    def __init__(self, *parts: Call) -> None:
        self._parts = parts

    @property
    def is_ready(self) -> bool:
        """Whether both halves would run without waiting."""
        return all(part.is_ready for part in self._parts)

    def wait(self) -> None:
        """Take in what both halves need."""
        for part in self._parts:
            part.wait()

    def __call__(self) -> None:
        """One after the other."""
        for part in self._parts:
            part()


class SendCall(Call):
    """Start a message with what the stage made for the other one."""

    __slots__ = ("_cell", "_consumer", "_departure", "_route", "_transport")

    def __init__(self, transport: Transport, route: Route, cell: Cell, consumer: int) -> None:
        self._transport, self._route, self._cell, self._consumer = transport, route, cell, consumer
        self._departure: Departure | None = None

    def __call__(self) -> None:
        """Send without waiting."""
        self._departure = self._transport.send(self._route, self._cell.outbox.pop(self._consumer))

    def settle(self) -> None:
        """Let go of the memory, once the message is known to have arrived or the step is over."""
        if self._departure is not None:
            self._departure.wait()
            self._departure = None

    def forget(self) -> None:
        """Let go of it without waiting, after a failure."""
        self._departure = None


class ReceiveCall(Call):
    """Post the buffers of a message that the cell will need."""

    __slots__ = ("_cell", "_producer", "_route", "_transport")

    def __init__(self, transport: Transport, route: Route, cell: Cell, producer: int | None) -> None:
        self._transport, self._route, self._cell, self._producer = transport, route, cell, producer

    def __call__(self) -> None:
        """Post without waiting."""
        arrival = self._transport.receive(self._route)
        if self._producer is None:
            self._cell.arrivals.append((self._route, arrival))
        else:
            self._cell.gradients[self._producer] = arrival


class StageCall(Call):
    """Something done once to a whole stage: reduce, unshard, reshard."""

    __slots__ = ("_do", "_stage")

    def __init__(self, do: Any, stage: int) -> None:
        self._do, self._stage = do, stage

    def __call__(self) -> None:
        """Do it."""
        self._do(self._stage)


class SettlingCall(Call):
    """A call at whose messages it is known that some sends have arrived."""

    __slots__ = ("_call", "_sends")

    def __init__(self, call: Call, sends: Sequence[SendCall]) -> None:
        self._call, self._sends = call, tuple(sends)

    @property
    def is_ready(self) -> bool:
        """Whether the call itself is."""
        return self._call.is_ready

    def wait(self) -> None:
        """Wait for what the call needs, then let go of what was sent."""
        self._call.wait()
        for send in self._sends:
            send.settle()

    def __call__(self) -> None:
        """Run the call itself."""
        self._call()


class NothingCall(Call):
    """What has nothing left to do: a message that is empty, or a Free of what went with the last backward."""

    __slots__ = ()

    def __call__(self) -> None:
        """Nothing."""
