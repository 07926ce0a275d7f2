"""Boxes: for every handing of values or gradients from stage to stage, the place that a rank has for it."""

from collections.abc import Iterable, Mapping, Sequence

from penstock.ir import Action, Crossing, Kind, Message, Program, Value
from penstock.runtime.calls import Source, Target
from penstock.runtime.transports import MessageKey, RecvSlot, Route, SendSlot, TensorCodec, Tensors, Transport

Edges = Mapping[tuple[int, int], Crossing]


class Handed:
    """What one stage hands to another of the same rank, from when it is made until it is used."""

    __slots__ = ("_tensors",)

    def __init__(self) -> None:
        self._tensors: Tensors = ()

    def put(self, tensors: Tensors) -> None:
        """What was made."""
        self._tensors = tensors

    def take(self) -> Tensors:
        """What is to be used; it is the caller's from now on."""
        tensors, self._tensors = self._tensors, ()
        return tensors

    def clear(self) -> None:
        """Let go of it, after a failure."""
        self._tensors = ()


class Boxes:
    """The ends of the messages of one rank, and what its own stages hand to each other."""

    def __init__(self, program: Program, edges: Sequence[Edges], transport: Transport) -> None:
        self._program, self._edges, self._transport = program, edges, transport
        self.arrivals: dict[MessageKey, RecvSlot] = {}
        self.departures: dict[MessageKey, SendSlot] = {}
        self.handed: dict[MessageKey, Handed] = {}
        self._wires: dict[tuple[int, bool], TensorCodec] = {}

    def add(self, actions: Iterable[tuple[Action, int]]) -> None:
        """Make the ends of all messages among some actions, given with their codes; those of nothing have none."""
        for action, code in actions:
            if isinstance(action, Message) and (values := self._content(message_key(action))):
                route = self._route(action, code, values)
                if action.kind is Kind.SEND:
                    self.departures[message_key(action)] = self._transport.send_slot(route)
                else:
                    self.arrivals[message_key(action)] = self._transport.recv_slot(route)

    def values_to(self, stage: int, microbatch: int) -> list[Source]:
        """What a forward uses."""
        return [self._source(c.values, (c.producer, stage, microbatch)) for c in self._into(stage, microbatch)]

    def values_of(self, stage: int, microbatch: int) -> list[Target]:
        """What a forward makes."""
        return [self._target(c.values, (stage, c.consumer, microbatch)) for c in self._out_of(stage, microbatch)]

    def gradients_to(self, stage: int, microbatch: int) -> list[Source]:
        """What a backward uses, from the last reader to the first: in that order autograd adds in the unsplit model."""
        crossings = sorted(self._out_of(stage, microbatch), key=lambda crossing: -crossing.consumer)
        return [self._source(c.gradients, (c.consumer, stage, microbatch)) for c in crossings if c.gradients]

    def gradients_of(self, stage: int, microbatch: int) -> list[Target]:
        """What a backward makes."""
        crossings = self._into(stage, microbatch)
        return [self._target(c.gradients, (stage, c.producer, microbatch)) for c in crossings if c.gradients]

    def _into(self, stage: int, microbatch: int) -> list[Crossing]:
        return [crossing for crossing in self._edges[microbatch].values() if crossing.consumer == stage]

    def _out_of(self, stage: int, microbatch: int) -> list[Crossing]:
        return [crossing for crossing in self._edges[microbatch].values() if crossing.producer == stage]

    def _source(self, values: Sequence[Value], way: MessageKey) -> Source:
        return Source(_names(values), self.arrivals.get(way) or self._handed(way))

    def _target(self, values: Sequence[Value], way: MessageKey) -> Target:
        return Target(_names(values), self.departures.get(way) or self._handed(way))

    def _handed(self, way: MessageKey) -> Handed:
        return self.handed.setdefault(way, Handed())

    def _content(self, way: MessageKey) -> tuple[Value, ...]:
        source, target, microbatch = way
        crossing = self._edges[microbatch].get((min(source, target), max(source, target)))
        if crossing is None:
            return ()
        return crossing.gradients if source > target else crossing.values

    def _route(self, message: Message, code: int, values: Sequence[Value]) -> Route:
        way = message_key(message)
        tag = way[0] * self._program.num_stages + way[1]
        wires = tuple(self._wire(value, message.is_gradient) for value in values)
        return Route(code, way, self._program.placement[message.peer], tag, wires)

    def _wire(self, value: Value, is_gradient: bool) -> TensorCodec:
        key = (id(value), is_gradient)
        if key not in self._wires:
            self._wires[key] = TensorCodec(value, is_gradient)
        return self._wires[key]


def message_key(message: Message) -> MessageKey:
    """From where to where a message goes, whoever of both does this."""
    if message.kind is Kind.SEND:
        return message.stage, message.peer, message.microbatch
    return message.peer, message.stage, message.microbatch


def _names(values: Sequence[Value]) -> tuple[str, ...]:
    return tuple(value.name for value in values)
