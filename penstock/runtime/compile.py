"""Compile: the order of one rank as a flat list of prepared calls."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

from penstock.ir import Action, ComputeAction, Forward, InputGrad, Kind, Message, Overlap, Program, WeightGrad
from penstock.runtime.boxes import Boxes, Edges, Handed, message_key
from penstock.runtime.calls import BackwardCall, Cell, ForwardCall, OverlapCall, PassCall, Player, WeightGradCall
from penstock.runtime.receipts import receipts
from penstock.runtime.transports import RecvSlot, SendSlot, Transport

Run = Callable[[], None]


class Ready(NamedTuple):
    """One action, ready to run: after all `waits`, of which those for `arrivals` may take time.

    What has nothing left to do, a message that is empty or a Free of what went with the last backward, has no `run`.
    """

    code: int
    run: Run | None = None
    waits: tuple[Run, ...] = ()
    arrivals: tuple[RecvSlot, ...] = ()
    is_told: bool = True
    """whether it is worth a note: room for a message is not"""

    @property
    def is_ready(self) -> bool:
        """Whether it would run without waiting for a message."""
        return all(arrival.is_ready for arrival in self.arrivals)


@dataclass(frozen=True)
class Prepared:
    """The actions of one rank in order, and all that is kept while they run."""

    rank: int
    actions: tuple[Ready, ...]
    cells: tuple[Cell, ...]
    departures: tuple[SendSlot, ...]
    boxes: tuple[RecvSlot | Handed, ...]

    @cached_property
    def busy(self) -> tuple[tuple[int, tuple[Run, ...], bool, Run], ...]:
        """Code, waits, whether to tell, and run of those that do something."""
        return tuple((one.code, one.waits, one.is_told, one.run) for one in self.actions if one.run is not None)

    def settle(self) -> None:
        """Wait until everything sent has arrived."""
        for departure in self.departures:
            departure.finish()

    def clear(self) -> None:
        """Let go of what an interrupted step has left behind."""
        for kept in (*self.cells, *self.departures, *self.boxes):
            kept.clear()


def compile_rank(program: Program, rank: int, edges: Sequence[Edges], player: Player, transport: Transport) -> Prepared:
    """Prepare the order of a rank; `edges` are the crossings of every microbatch."""
    return _Compiler(program, rank, edges, player, transport).prepared()


class _Compiler:
    def __init__(
        self, program: Program, rank: int, edges: Sequence[Edges], player: Player, transport: Transport
    ) -> None:
        self._program, self._rank, self._player, self._open = program, rank, player, transport.run_check
        stages = program.placement.stages[rank]
        self._cells = {(s, m): Cell(s, m) for s in stages for m in range(program.num_microbatches)}
        self._boxes = Boxes(program, edges, transport)
        self._actions = program.orders[rank]
        split = (a for a in self._actions if isinstance(a, InputGrad) and player.can_split(a.stage))
        self._split = {(a.stage, a.microbatch) for a in split} - set(_adjacent(self._actions))

    def prepared(self) -> Prepared:
        coded = list(zip(self._actions, self._program.table.rank(self._rank).tolist(), strict=True))
        self._boxes.add(coded)
        settled = receipts(self._program, self._rank)
        ready = [self._ready(action, code, settled.get(place, ())) for place, (action, code) in enumerate(coded)]
        messages = (place for place, action in enumerate(self._actions) if isinstance(action, Message))
        if (first := next((place for place in messages if ready[place].run is not None), None)) is not None:
            ready[first] = ready[first]._replace(waits=(self._open,))
        return Prepared(
            self._rank,
            tuple(ready),
            tuple(self._cells.values()),
            tuple(self._boxes.departures.values()),
            (*self._boxes.arrivals.values(), *self._boxes.handed.values()),
        )

    def _ready(self, action: Action, code: int, settled: Sequence[int]) -> Ready:
        if isinstance(action, Message):
            return Ready(code, self._message(action), is_told=action.kind is Kind.SEND)
        if not isinstance(action, ComputeAction | Overlap):
            return Ready(code, self._of_stage(action))
        calls = [self._call(part) for part in action.parts]
        arrivals = tuple(box for call in calls for _, box in call.sources if isinstance(box, RecvSlot))
        waits = (*[arrival.wait for arrival in arrivals], *[departure.release for departure in self._sent(settled)])
        return Ready(code, calls[0] if len(calls) == 1 else OverlapCall(calls), waits, arrivals)

    def _message(self, message: Message) -> Run | None:
        """None where there is nothing to send for this microbatch."""
        way = message_key(message)
        if message.kind is Kind.SEND:
            return self._boxes.departures[way].send if way in self._boxes.departures else None
        return self._boxes.arrivals[way].post if way in self._boxes.arrivals else None

    def _of_stage(self, action: Action) -> Run | None:
        player = self._player
        does = {Kind.REDUCE: player.reduce, Kind.UNSHARD: player.unshard, Kind.RESHARD: player.reshard}
        # What a Free frees has gone with the last backward.
        return None if action.kind is Kind.FREE else partial(does[action.kind], action.stage)

    def _call(self, action: ComputeAction) -> PassCall | WeightGradCall:
        boxes, place = self._boxes, (action.stage, action.microbatch)
        cell, is_split = self._cells[place], place in self._split
        if isinstance(action, WeightGrad):
            return WeightGradCall(cell)
        if isinstance(action, Forward):
            return ForwardCall(self._player, cell, boxes.values_to(*place), boxes.values_of(*place), is_split)
        return BackwardCall(self._player, cell, boxes.gradients_to(*place), boxes.gradients_of(*place), is_split)

    def _sent(self, places: Sequence[int]) -> list[SendSlot]:
        ways = [message_key(self._actions[place]) for place in places]  # type: ignore[arg-type]
        return [self._boxes.departures[way] for way in ways if way in self._boxes.departures]


def _adjacent(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """The places whose weight gradient follows directly on the input gradient: one full backward does both.

    With a message in between the split stays: the gradient leaves before the weights are looked at.
    """
    for one, other in pairwise(actions):
        if isinstance(one, InputGrad) and other == WeightGrad(one.stage, one.microbatch):
            yield one.stage, one.microbatch
