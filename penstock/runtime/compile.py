"""Compile: the order of one rank as a flat list of prepared calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from penstock.ir.action import Action, Backward, Forward, InputGrad, Kind, Message, Overlap, WeightGrad
from penstock.ir.graph import Value
from penstock.ir.partition import Crossing
from penstock.ir.program import Program
from penstock.runtime.calls import (
    BackwardCall,
    Call,
    Cell,
    ForwardCall,
    Hand,
    NothingCall,
    OverlapCall,
    Player,
    ReceiveCall,
    SendCall,
    SettlingCall,
    StageCall,
    WeightGradCall,
)
from penstock.runtime.receipts import receipts
from penstock.runtime.transport import Route, Transport
from penstock.runtime.wire import Wire

Edges = Mapping[tuple[int, int], Crossing]


@dataclass(frozen=True)
class Prepared:
    """The calls of one rank in order, with the codes of their actions, and the cells that they share."""

    rank: int
    calls: tuple[Call, ...]
    codes: tuple[int, ...]
    cells: tuple[Cell, ...]
    sends: tuple[SendCall, ...]

    @cached_property
    def busy(self) -> tuple[tuple[int, Call], ...]:
        """The calls that do something, with their codes."""
        pairs = zip(self.codes, self.calls, strict=True)
        return tuple((code, call) for code, call in pairs if not isinstance(call, NothingCall))

    def settle(self) -> None:
        """Wait until everything sent has arrived."""
        for send in self.sends:
            send.settle()

    def part(self, place: int) -> "Prepared":
        """Only the call of one place."""
        return Prepared(self.rank, self.calls[place : place + 1], self.codes[place : place + 1], self.cells, self.sends)

    def clear(self) -> None:
        """Let go of what an interrupted step has left behind."""
        for cell in self.cells:
            cell.clear()
        for send in self.sends:
            send.forget()


def compile_rank(program: Program, rank: int, edges: Sequence[Edges], player: Player, transport: Transport) -> Prepared:
    """Prepare the order of a rank; `edges` are the crossings of every microbatch."""
    return _Compiler(program, rank, edges, player, transport).prepared()


class _Compiler:
    def __init__(
        self, program: Program, rank: int, edges: Sequence[Edges], player: Player, transport: Transport
    ) -> None:
        self._program, self._rank, self._edges = program, rank, edges
        self._player, self._transport = player, transport
        stages = program.placement.stages[rank]
        self._cells = {(s, m): Cell() for s in stages for m in range(program.num_microbatches)}
        actions = program.orders[rank]
        split = (a for a in actions if isinstance(a, InputGrad) and player.can_split(a.stage))
        self._split = {(a.stage, a.microbatch) for a in split} - set(_adjacent(actions))
        self._wires: dict[int, tuple[Wire, ...]] = {}

    def prepared(self) -> Prepared:
        codes = self._program.table.rank(self._rank).tolist()
        calls = [self._call(action, code) for action, code in zip(self._program.orders[self._rank], codes, strict=True)]
        sends = {place: call for place, call in enumerate(calls) if isinstance(call, SendCall)}
        for place, settled in receipts(self._program, self._rank).items():
            calls[place] = SettlingCall(calls[place], [sends[send] for send in settled if send in sends])
        return Prepared(self._rank, tuple(calls), tuple(codes), tuple(self._cells.values()), tuple(sends.values()))

    def _call(self, action: Action, code: int) -> Call:
        if isinstance(action, Message):
            return self._message(action, code)
        if isinstance(action, Overlap):
            return OverlapCall(*(self._call(part, code) for part in action.parts))
        if isinstance(action, Forward):
            return self._forward(action.stage, action.microbatch)
        if isinstance(action, Backward | InputGrad):
            return self._backward(action.stage, action.microbatch)
        if isinstance(action, WeightGrad):
            return WeightGradCall(self._cells[action.stage, action.microbatch])
        if action.kind is Kind.FREE:
            return NothingCall()
        return StageCall(self._stage_actions()[action.kind], action.stage)

    def _stage_actions(self) -> dict[Kind, Callable[[int], None]]:
        player = self._player
        return {Kind.REDUCE: player.reduce, Kind.UNSHARD: player.unshard, Kind.RESHARD: player.reshard}

    def _forward(self, stage: int, microbatch: int) -> Call:
        crossings = [c for (p, _), c in self._edges[microbatch].items() if p == stage]
        hands = [Hand(c.consumer, _names(c.values), self._cells.get((c.consumer, microbatch))) for c in crossings]
        place = (stage, microbatch)
        return ForwardCall(self._player, place, self._cells[place], hands, place in self._split)

    def _backward(self, stage: int, microbatch: int) -> Call:
        edges = [c for c in self._edges[microbatch].values() if c.gradients]
        place = (stage, microbatch)
        producers = [
            Hand(c.producer, _names(c.gradients), self._cells.get((c.producer, microbatch)))
            for c in edges
            if c.consumer == stage
        ]
        consumers = [Hand(c.consumer, _names(c.gradients), None) for c in edges if c.producer == stage]
        return BackwardCall(self._player, place, self._cells[place], (producers, consumers), place in self._split)

    def _message(self, message: Message, code: int) -> Call:
        crossing, values = self._content(message)
        if crossing is None or not values:
            return NothingCall()
        cell = self._cells[message.stage, message.microbatch]
        edge = crossing.producer * self._program.num_stages + crossing.consumer
        tag = 2 * edge + message.is_gradient
        key = (edge, message.microbatch, int(message.is_gradient))
        route = Route(code, key, self._program.placement[message.peer], tag, self._wires_of(values))
        if message.kind is Kind.SEND:
            return SendCall(self._transport, route, cell, message.peer)
        return ReceiveCall(self._transport, route, cell, message.peer if message.is_gradient else None)

    def _content(self, message: Message) -> tuple[Crossing | None, tuple[Value, ...]]:
        edge = (min(message.stage, message.peer), max(message.stage, message.peer))
        crossing = self._edges[message.microbatch].get(edge)
        if crossing is None:
            return None, ()
        return crossing, crossing.gradients if message.is_gradient else crossing.values

    def _wires_of(self, values: tuple[Value, ...]) -> tuple[Wire, ...]:
        return tuple(self._wires.setdefault(id(value), (Wire(value),))[0] for value in values)


def _names(values: Sequence[Value]) -> tuple[str, ...]:
    return tuple(value.name for value in values)


def _adjacent(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """The places whose weight gradient follows directly on the input gradient: one full backward does both.

    With a message in between the split stays: the gradient leaves before the weights are looked at.
    """
    for one, other in pairwise(actions):
        if isinstance(one, InputGrad) and other == WeightGrad(one.stage, one.microbatch):
            yield one.stage, one.microbatch
