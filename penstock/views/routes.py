"""Routes: which wires of a flow go straight down to the next part, and which run in lanes at its sides."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.ir import Value
from penstock.views.flow import Flow, Wire


class Trunk(NamedTuple):
    """A wire in a lane beside the parts: from the side of its source along the lane to the sides of its targets."""

    wire: Wire
    lane: int


@dataclass(frozen=True)
class Routes:
    """The wires of a flow by their ways."""

    flow: Flow

    @cached_property
    def column(self) -> tuple[int, ...]:
        """The places of the parts in the middle column, and of the outputs, from top to bottom."""
        others = (place for place, part in enumerate(self.flow.parts) if not part.is_free)
        return (*others, self.flow.outputs)

    @cached_property
    def straight(self) -> dict[int, tuple[Value, ...]]:
        """By place, what a part in the column gets straight from the one above it."""
        above = dict(zip(self.column[1:], self.column, strict=False))
        found: dict[int, tuple[Value, ...]] = {}
        for wire in self.flow.wires:
            for target in wire.targets:
                if above.get(target) == wire.source:
                    found[target] = (*found.get(target, ()), *wire.values)
        return found

    @cached_property
    def right(self) -> tuple[Trunk, ...]:
        """Skips: what passes by the next part, in lanes from the inner to the outer."""
        below = dict(zip(self.column, self.column[1:], strict=False))
        wires = [wire for wire in self.flow.wires if wire.source in below]
        skips = [wire._replace(targets=tuple(t for t in wire.targets if t != below[wire.source])) for wire in wires]
        return _in_lanes([wire for wire in skips if wire.targets])

    @cached_property
    def left(self) -> tuple[Trunk, ...]:
        """What depends on inputs only."""
        return _in_lanes([wire for wire in self.flow.wires if self.flow.parts[wire.source].is_free])

    def rights_of(self, place: int) -> tuple[tuple[Trunk, ...], tuple[Trunk, ...]]:
        """The trunks that enter and that leave a part at its right."""
        entering = tuple(trunk for trunk in self.right if place in trunk.wire.targets)
        return entering, tuple(trunk for trunk in self.right if trunk.wire.source == place)

    def lefts_of(self, place: int) -> tuple[Trunk, ...]:
        """The trunks from what depends on inputs only that enter or leave a part."""
        return tuple(trunk for trunk in self.left if place in (trunk.wire.source, *trunk.wire.targets))

    @cached_property
    def beside(self) -> dict[int, tuple[int, ...]]:
        """By place in the column, the parts that depend on inputs only and stand beside it: they come before it."""
        found: dict[int, tuple[int, ...]] = {}
        waiting: list[int] = []
        for place, part in enumerate(self.flow.parts):
            if part.is_free:
                waiting.append(place)
            else:
                found[place], waiting = tuple(waiting), []
        return {**found, self.flow.outputs: tuple(waiting)}


def _in_lanes(wires: Sequence[Wire]) -> tuple[Trunk, ...]:
    """Each wire in the innermost lane that is free over its length; short ones first, so that long ones go around."""
    lanes: list[list[tuple[int, int]]] = []
    trunks: list[Trunk] = []
    for wire in sorted(wires, key=lambda wire: (max(wire.targets) - wire.source, wire.source)):
        low, high = wire.source, max(wire.targets)
        lane = next((n for n, used in enumerate(lanes) if all(high < a or b < low for a, b in used)), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((low, high))
        trunks.append(Trunk(wire, lane))
    return tuple(sorted(trunks, key=lambda trunk: trunk.wire.source))
