"""critical_path: the chain of passes and messages on which the length of a step hangs, predicted or recorded."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import COMPUTE_KINDS, Action, ComputeAction, Kind, Overlap, Send, needs
from penstock.ir.code import Codes, decode, pack, peer_of
from penstock.ir.dependence import Makers
from penstock.ir.trace import Span, Trace, Transfer

Item = Span | Transfer
_TOLERANCE = 1e-9


def critical_path(trace: Trace) -> tuple[Item, ...]:
    """From the first item to the one that ends last, each starting when, or after, the one before it ended.

    An item follows what it waited for: of the item before it on its rank or link, and the passes and messages that it
    needs, the one that ended last. Where a rank only waited (a recorded trace), the chain has a gap.
    """
    if not len(trace.starts):
        return ()
    return _Path(trace).backwards()[::-1]


class _Path:
    """The lookups of one trace. A place below the number of actions is an action, one above it is a message."""

    def __init__(self, trace: Trace) -> None:
        table = trace.program.table
        self.trace = trace
        self.starts = np.concatenate((trace.starts.values, trace.sent.values))
        self.ends = np.concatenate((trace.ends.values, trace.arrived.values))
        self.sends = np.flatnonzero(table.kinds == Kind.SEND)
        self.makers = Makers(table.passes, trace.program.num_stages, trace.program.num_microbatches)
        self.message_of = {code: place for place, code in enumerate(table.codes[self.sends].tolist())}
        self.before = np.concatenate((_before_on_rank(trace), _before_on_link(trace, self.sends)))

    def backwards(self) -> tuple[Item, ...]:
        last_end = np.flatnonzero(self.trace.ends.values == self.trace.ends.values.max())
        solid = last_end[_is_solid(self.trace)[last_end]]
        place = int((solid if len(solid) else last_end)[0])
        items, seen = [], set()
        while place >= 0 and place not in seen:
            seen.add(place)
            items.append(self._item(place))
            place = self._waited_for(place)
        return tuple(items)

    def _item(self, place: int) -> Item:
        start, end = float(self.starts[place]), float(self.ends[place])
        if place < len(self.trace.starts):
            return Span(int(self.trace.program.table.rank_of[place]), self._action(place), start, end)
        action = self._action(int(self.sends[place - len(self.trace.starts)]))
        placement = self.trace.program.placement
        assert isinstance(action, Send)
        return Transfer(placement[action.stage], placement[action.peer], action, start, end)

    def _action(self, index: int) -> Action:
        return decode(self.trace.program.table.codes[index : index + 1])[0]

    def _waited_for(self, place: int) -> int:
        """The place that ended last of those that the given one had to wait for; -1 at the beginning."""
        latest = float(self.starts[place]) + _TOLERANCE * self.trace.makespan
        if place < len(self.trace.starts):
            earlier = [self._last_above(place, latest), *self._needed(place)]
        else:
            send = int(self.sends[place - len(self.trace.starts)])
            earlier = [self._last_above(send, latest), int(self.before[place])]
        found = [other for other in earlier if other >= 0 and self.ends[other] <= latest]
        return max(found, key=lambda other: (self.ends[other], self.starts[other], other), default=-1)

    def _last_above(self, index: int, latest: float) -> int:
        """The nearest action above on the rank that ended in time; a rank may have done several things at once."""
        above = int(self.before[index])
        while above >= 0 and self.ends[above] > latest:
            above = int(self.before[above])
        return above

    def _needed(self, index: int) -> Iterator[int]:
        action, program = self._action(index), self.trace.program
        for part in action.parts if isinstance(action, ComputeAction | Overlap) else ():
            for fact, stage, microbatch in needs(part, program.cuts):
                if program.placement[stage] == program.placement[part.stage]:
                    yield int(self.makers[fact][stage, microbatch])
                else:
                    yield self._message(stage, microbatch, part.stage)

    def _message(self, source: int, microbatch: int, target: int) -> int:
        code = int(pack(Kind.SEND, source, microbatch, target)[0])
        return len(self.trace.starts) + self.message_of[code] if code in self.message_of else -1


def _is_solid(trace: Trace) -> NDArray[np.bool_]:
    """Which actions took time, or are passes; the others only mark a moment."""
    return np.isin(trace.program.table.kinds, COMPUTE_KINDS) | (trace.ends.values > trace.starts.values)


def _before_on_rank(trace: Trace) -> NDArray[np.int64]:
    """Per action the nearest action above it on its rank that took time; -1 if there is none."""
    table = trace.program.table
    index = np.arange(len(table.codes), dtype=np.int64)
    nearest = np.maximum.accumulate(np.where(_is_solid(trace), index, -1))
    above = np.concatenate(([-1], nearest[:-1]))
    return np.where(above >= table.starts[table.rank_of], above, -1)


def _before_on_link(trace: Trace, sends: Codes) -> NDArray[np.int64]:
    """Per message the place of the one before it from the same rank to the same rank; -1 if there is none."""
    table, ranks = trace.program.table, np.asarray(trace.program.placement.ranks)
    link = table.rank_of[sends] * trace.num_ranks + ranks[peer_of(table.codes[sends])]
    by_link = np.argsort(link, kind="stable")
    before = np.full(len(sends), -1, dtype=np.int64)
    same = link[by_link][1:] == link[by_link][:-1]
    before[by_link[1:][same]] = by_link[:-1][same] + len(table.codes)
    return before
